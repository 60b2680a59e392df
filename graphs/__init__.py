"""The ladder: whole dataflows as functions of the four tensors, and the versions that configs/ladder makes of them.

A recipe is a function recipe(x, in_gate, out_gate, k, *, parameters) -> y, one family a file. A version is a recipe
with its parameters and a SolverConfig: mode, options, dynamic, limits. A new file configs/ladder/v54.yaml is a new one.
"""
import csv
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from glconv.compiled import Function, compile_graph, missing_toolchain
from glconv.config import DEFAULTS, SolverConfig
from glconv.spectral.pairs import Packing

from .guarded import AddressGuard, guarded_real_fft
from .hermitian import full_spectrum
from .local import local_product
from .overlap import overlap_add
from .pairs import complex_pairs, packed_pairs
from .real import real_fft

LADDER = Path(__file__).resolve().parent.parent / "configs" / "ladder"
RECIPES: dict[str, Function] = {recipe.__name__: recipe for recipe in (
    real_fft, overlap_add, local_product, full_spectrum, guarded_real_fft, complex_pairs, packed_pairs)}
# What goes around a compiled recipe, where the idea is not in the graph itself.
WRAPPERS: dict[str, Callable[[Function], Function]] = {"guarded_real_fft": AddressGuard}
PACKING_KEYS = tuple(field.name for field in fields(Packing))


@dataclass(frozen=True)
class Version:
    """One step of the ladder."""

    name: str                           # v01, or the file's name
    recipe: str                         # a key of RECIPES
    parameters: tuple[tuple[str, Any], ...]
    config: SolverConfig

    def solver(self, device: torch.device) -> "Solver":
        """A fresh solver: nothing compiled yet."""
        return Solver(self, device)


class Solver:
    """A version as a callable of the four tensors; one graph function a length, compiled as the config says.

    The length is a constant of every graph, also of a dynamic one: FFT sizes and scales follow from it.
    """

    def __init__(self, version: Version, device: torch.device) -> None:
        self.version = version
        self.config = version.config
        self.compiles = version.config.compile and not missing_toolchain(device)
        self.graphs: dict[int, Function] = {}

    def __call__(self, x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        graph = self.graphs.get(length)
        if graph is None:
            function = self.function(length)
            graph = compile_graph(function, self.config) if self.compiles else function
            graph = self.graphs[length] = WRAPPERS.get(self.version.recipe, lambda graph: graph)(graph)
        return graph(x, in_gate, out_gate, k)

    def function(self, length: int) -> Function:
        """The recipe with its parameters bound, for one length, uncompiled."""
        recipe, parameters = RECIPES[self.version.recipe], dict(self.version.parameters)

        def bound(x: torch.Tensor, in_gate: torch.Tensor, out_gate: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != length:       # under dynamic shapes this comparison makes the length a constant
                raise ValueError(f"x has length {x.shape[-1]}; want {length}")
            return recipe(x, in_gate, out_gate, k, **parameters)

        return functools.update_wrapper(bound, recipe, updated=())


def load(path: Path) -> Version:
    """The version in a YAML file: SolverConfig's keys, `recipe`, and `parameters` of that recipe.

    Raises ValueError or TypeError, naming the file and the key and listing what is allowed; OSError.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
        return from_mapping(path.stem, content)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error


def from_mapping(name: str, content: object) -> Version:
    """The version that a mapping describes; see `load`."""
    if not isinstance(content, Mapping) or "recipe" not in content:
        raise ValueError(f"want a mapping with recipe: one of {', '.join(RECIPES)}; parameters; SolverConfig's keys")
    settings = dict(content)
    recipe, parameters = settings.pop("recipe"), settings.pop("parameters", {})
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known recipes: {', '.join(RECIPES)}")
    for key in settings:
        if key not in DEFAULTS:
            raise ValueError(f"unknown key {key!r}; known keys: recipe, parameters, {', '.join(DEFAULTS)}")
    if settings.get("graph", "auto") != "auto":
        raise ValueError(f"graph is {settings['graph']!r} beside a recipe, which is the graph; leave it out")
    return Version(name, recipe, bind(recipe, parameters), SolverConfig.from_mapping(settings))


def bind(recipe: str, parameters: object) -> tuple[tuple[str, Any], ...]:
    """The recipe's keyword arguments for YAML's `parameters`, checked; fields of Packing are named directly."""
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters is {parameters!r}; want a mapping of parameters of {recipe}")
    known = recipe_parameters(recipe)
    bound: dict[str, Any] = {}
    packing: dict[str, Any] = {}
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"unknown parameter {key!r} of {recipe}; known parameters: {', '.join(known) or 'none'}")
        default, choices = known[key]
        if type(value) is not type(default):
            raise TypeError(f"{key} is {value!r}, a {type(value).__name__}; want "
                            f"{'one of ' + ', '.join(choices) if choices else 'a ' + type(default).__name__}")
        if choices and value not in choices:
            raise ValueError(f"{key} is {value!r}; want one of {', '.join(choices)}")
        (packing if key in PACKING_KEYS and "packing" in keywords(recipe) else bound)[key] = value
    if packing:
        bound["packing"] = Packing(**packing)
    return tuple(sorted(bound.items()))


def recipe_parameters(recipe: str) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Every parameter of a recipe by the name YAML gives it: (default, choices or ())."""
    hints = typing.get_type_hints(RECIPES[recipe])
    known: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for name, parameter in keywords(recipe).items():
        if name == "packing":
            known |= {field.name: (field.default, ()) for field in fields(Packing)}
        else:
            known[name] = (parameter.default, typing.get_args(hints[name]))
    return known


def keywords(recipe: str) -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(RECIPES[recipe]).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def ladder() -> list[Version]:
    """Every version in configs/ladder, in the order of their names."""
    return [load(path) for path in sorted(LADDER.glob("*.yaml"))]


def published() -> dict[str, dict[str, str]]:
    """The published figures by version: published_speedup (empty where only ratios were given), minute, change."""
    with (LADDER / "published.csv").open(newline="") as stream:
        return {row["version"]: row for row in csv.DictReader(stream)}
