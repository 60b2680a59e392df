"""Every knob of the solver: its name, default, meaning and limits, once. YAML files name the fields by these names."""
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

CONFIG_VARIABLE = "GLCONV_CONFIG"
GRAPHS = ("auto", "fused", "spectral", "right-angle", "eager")
KERNELS = ("auto", "portable", "hopper")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
TRANSFORM_DTYPES = ("auto", "float16", "float32")
COMPILED_GRAPHS = ("auto", "spectral", "right-angle")

Scalar = bool | int | float | str


def _knob(default: object, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": choices})


@dataclass(frozen=True)
class SolverConfig:
    """One solver configuration: checked when made, immutable and hashable.

    Raises TypeError for a value of the wrong type, ValueError for a value or a combination that is not possible; the
    text names the key and lists what is allowed. `from_mapping` also refuses unknown keys.
    """

    graph: str = _knob("auto", "the dataflow; auto: the fused kernel on CUDA wherever the plan has one, else the "
                       "spectral graph; the right-angle graph on a CPU", GRAPHS)
    kernel: str = _knob("auto", "which fused kernel; auto: the plan chooses by device", KERNELS)
    compile: bool = _knob(True, "torch.compile the spectral or right-angle graph; false runs it operator by operator")
    mode: str = _knob("default", "Inductor mode of a compiled graph", MODES)
    options: Mapping[str, Scalar] | tuple[tuple[str, Scalar], ...] = _knob(
        (), "Inductor options of a compiled graph by name, such as combo_kernels: true; torch.compile takes either "
        "these or a mode")
    dynamic: bool = _knob(False, "one compiled graph for all shapes; false: one specialised graph a shape")
    recompile_limit: int = _knob(64, "compiled graphs kept for one function before a warning is given; at least 1")
    transform_dtype: str = _knob("auto", "precision of the spectral graph's transforms; auto: float16 on CUDA for "
                                 "sizes that are a power of two, else float32", TRANSFORM_DTYPES)

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(sorted(self.options.items(), key=lambda item: str(item[0]))))
        for knob in fields(self):
            _check_value(knob.name, getattr(self, knob.name), type(knob.default), knob.metadata["choices"])
        if self.recompile_limit < 1:
            raise ValueError(f"recompile_limit is {self.recompile_limit}; want at least 1")
        _check_options(tuple(self.options))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.options and self.mode != "default":
            raise ValueError(f"options and mode: {self.mode} exclude each other in torch.compile; want mode: default "
                             "with options, or no options")
        compiled_only = [name for name in ("mode", "options", "dynamic") if getattr(self, name) != DEFAULTS[name]]
        if compiled_only and not self.compile:
            raise ValueError(f"{compiled_only[0]} is set with compile: false; want compile: true, or no "
                             f"{compiled_only[0]}")
        if compiled_only and self.graph not in COMPILED_GRAPHS:
            raise ValueError(f"{compiled_only[0]} is set with graph: {self.graph}, which is not compiled; want graph: "
                             + ", ".join(COMPILED_GRAPHS))
        if self.kernel != "auto" and self.graph not in ("auto", "fused"):
            raise ValueError(f"kernel: {self.kernel} is set with graph: {self.graph}; want graph: auto, fused")
        if self.transform_dtype == "float16" and self.graph not in ("auto", "spectral"):
            raise ValueError(f"transform_dtype: float16 is set with graph: {self.graph}; want graph: auto, spectral")

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> "SolverConfig":
        """The config with the given fields changed from their defaults, e.g. {"graph": "spectral"}.

        Raises TypeError when `mapping` is not a mapping, ValueError for an unknown key, and what the class raises.
        """
        if not isinstance(mapping, Mapping):
            raise TypeError(f"a config is of type {type(mapping).__name__}; want a mapping of {', '.join(DEFAULTS)}")
        for key in mapping:
            if key not in DEFAULTS:
                raise ValueError(f"unknown config key {key!r}; known keys: {', '.join(DEFAULTS)}")
        return SolverConfig(**mapping)

    @staticmethod
    def from_yaml(path: str | os.PathLike) -> "SolverConfig":
        """The config in a YAML file; an empty file gives the defaults.

        Raises OSError when it cannot be read, ImportError without PyYAML, ValueError or TypeError, naming the file, for
        what it says.
        """
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text())
            return SolverConfig.from_mapping({} if content is None else content)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error


DEFAULTS: dict[str, object] = {knob.name: knob.default for knob in fields(SolverConfig)}


@functools.cache
def active_config() -> SolverConfig:
    """The config of the process: the YAML file named by GLCONV_CONFIG, or the defaults; read once."""
    path = os.environ.get(CONFIG_VARIABLE)
    return SolverConfig.from_yaml(path) if path else SolverConfig()


def _check_value(name: str, value: object, kind: type, choices: tuple[str, ...]) -> None:
    """Exact types: YAML's true must not pass for 1, nor "false" for a truth value."""
    if name == "options" and type(value) is not kind:
        raise TypeError(f"options is {value!r}, of type {type(value).__name__}; want a mapping of Inductor option to "
                        "value")
    if type(value) is not kind:
        wanted = f"one of {', '.join(choices)}" if choices else kind.__name__
        raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; want {wanted}")
    if choices and value not in choices:
        raise ValueError(f"{name} is {value!r}; want one of {', '.join(choices)}")


def _check_options(options: tuple) -> None:
    """Names are Inductor's own, in the version at hand; values plain, so that the config can be hashed."""
    if not options:
        return
    import torch._inductor

    known = torch._inductor.list_options()
    for name, value in options:
        if name not in known:
            near = get_close_matches(str(name), known, n=5) or ["none is near; see torch._inductor.list_options()"]
            raise ValueError(f"options has {name!r}, unknown to this Inductor; nearest known: {', '.join(near)}")
        if not isinstance(value, Scalar):
            raise TypeError(f"options has {name}: {value!r}, of type {type(value).__name__}; want bool, int, float or "
                            "str")
