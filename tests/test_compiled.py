"""Static compiled graphs: one compilation a shape, limits within a scope, a warning at the limit, no silent eager."""
import re
import threading
import warnings

import pytest
import torch
from glconv import SolverConfig, compiled, gated_causal_conv
from glconv.compiled import CompiledGraph, RecompileLimitWarning, compile_graph, missing_toolchain
from glconv.reference import oracle, row_errors
from glconv.spectral import graph as spectral
from glconv.spectral import right_angle
from torch._dynamo.testing import CompileCounter

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing_toolchain(CPU) is not None, reason="needs a C++ compiler")


@pytest.fixture
def counter(monkeypatch, forgetful):
    """Dynamo's part alone, counted: what it traces runs as it is, without Inductor's seconds a graph."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "inductor_arguments", lambda config: {"backend": counter})
    return counter


def inputs(batch, streams, heads, length):
    torch.manual_seed(length)
    x, in_gate, out_gate = (torch.randn(batch, streams, heads, length).half() for _ in range(3))
    return x, in_gate, out_gate, torch.randn(streams, heads, length) / length**0.5


def shapes(count):
    return [(1 + i % 5, 1 + i % 3, 1 + i // 8, 4 + i) for i in range(count)]


def right(y, tensors):
    return bool((row_errors(y, oracle(*tensors)) < 1e-3).all())


def test_forty_shapes_make_forty_graphs_once(counter):
    graph = compile_graph(spectral.spectral_graph(torch.float32), SolverConfig(graph="spectral"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for shape in shapes(40):
                tensors = inputs(*shape)
                assert right(graph(*tensors), tensors), shape
    assert counter.frame_count == 40
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_dynamo_alone_would_have_stopped_at_its_limit(counter):
    """The test above means something: as one function, the same shapes run into Dynamo's limit of 8."""
    graph = torch.compile(spectral.spectral_graph(torch.float32), fullgraph=True, dynamic=False, backend=counter)
    for shape in shapes(8):
        graph(*inputs(*shape))
    ninth = inputs(*shapes(9)[-1])
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        graph(*ninth)


def test_beyond_the_limit_is_a_warning_and_a_right_answer(counter):
    graph = compile_graph(spectral.spectral_graph(torch.float32), SolverConfig(graph="spectral", recompile_limit=3))
    for shape in shapes(3):
        graph(*inputs(*shape))
    tensors = inputs(2, 1, 1, 99)
    with pytest.warns(RecompileLimitWarning, match=r"spectral_in: 3 graphs are compiled, .*\[2, 1, 1, 99\] "
                                                   "torch.float16.*uncompiled.*raise recompile_limit"):
        assert right(graph(*tensors), tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")      # said once a signature, and the compiled ones stay compiled
        assert right(graph(*tensors), tensors)
        for shape in shapes(3):
            graph(*inputs(*shape))
    assert counter.frame_count == 3


@pytest.mark.parametrize(("config", "function", "functions"), [
    (SolverConfig(graph="spectral", recompile_limit=3), "spectral", 1),
    (SolverConfig(graph="right-angle", recompile_limit=3), "real_rows", 2)], ids=["spectral", "right-angle"])
def test_the_limit_holds_for_all_lengths_together(counter, config, function, functions):
    """Through the public entry: three lengths are compiled, the fourth is not and says so, whatever else is called."""
    if missing_toolchain(CPU):
        pytest.skip("needs a C++ compiler")
    lengths = (8, 12, 16)
    for length in lengths:
        tensors = inputs(2, 1, 2, length)
        assert right(gated_causal_conv(*tensors, config), tensors)
    assert counter.frame_count == 3 * functions
    tensors = inputs(2, 1, 2, 20)
    with pytest.warns(RecompileLimitWarning) as caught:
        assert right(gated_causal_conv(*tensors, config), tensors)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == functions
    assert any(text.startswith(f"{function}: 3 graphs are compiled") and "20] torch.float16" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (*lengths, 20):
            gated_causal_conv(*inputs(2, 1, 2, length), config)
    assert counter.frame_count == 3 * functions


def test_another_config_has_graphs_of_its_own(counter):
    if missing_toolchain(CPU):
        pytest.skip("needs a C++ compiler")
    one, other = (SolverConfig(graph="spectral", recompile_limit=limit) for limit in (1, 2))
    tensors, longer = inputs(2, 1, 2, 8), inputs(2, 1, 2, 12)
    gated_causal_conv(*tensors, one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gated_causal_conv(*tensors, other)
        gated_causal_conv(*longer, other)
    assert counter.frame_count == 3
    with pytest.warns(RecompileLimitWarning):
        gated_causal_conv(*longer, one)


def test_dynamic_keeps_the_limit_too(counter):
    def branches(x):
        return x * 2 if x.shape[0] < 8 else x * 3

    graph = compile_graph(branches, SolverConfig(graph="spectral", dynamic=True, recompile_limit=1))
    assert torch.equal(graph(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.warns(RecompileLimitWarning, match="branches: 1 graphs are compiled"):
        assert torch.equal(graph(torch.ones(9)), torch.full((9,), 3.0))
    assert counter.frame_count == 1


def test_modes_of_a_call_are_part_of_its_signature(counter):
    """Dynamo specialises on them too; a graph it made in silence would escape the limit."""
    graph = compile_graph(lambda x, factor: x * factor, SolverConfig(graph="spectral", recompile_limit=5))
    x = torch.ones(3)
    for _ in range(2):
        graph(x, 2)
        graph(x, 3)
        with torch.no_grad():
            graph(x, 2)
        with torch.inference_mode():
            graph(x, 2)
        assert graph(x.requires_grad_(), 2).requires_grad
        x = x.detach()
    assert counter.frame_count == graph.compilations == len(graph.graphs) == 5


def test_threads_share_one_compilation(counter):
    graph = compile_graph(lambda x: x * 2, SolverConfig(graph="spectral"))
    start, results = threading.Barrier(4), []

    def call():
        start.wait()
        results.append(graph(torch.ones(3)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.tolist() for result in results] == [[2.0] * 3] * 4
    assert counter.frame_count == graph.compilations == 1


def test_what_a_compilation_calls_may_call_a_graph(counter, monkeypatch):
    """The lock is the process's and reentrant: a warning's hook, for one, runs while it is held."""
    graph = compile_graph(lambda x: x * 2, SolverConfig(graph="spectral", recompile_limit=1))
    graph(torch.ones(1))
    seen = []

    def hook(*warning):
        seen.append(graph(torch.ones(1)).tolist())
        if len(seen) == 1:
            seen.append(graph(torch.ones(3)).tolist())

    monkeypatch.setattr(warnings, "showwarning", hook)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hook
        thread = threading.Thread(target=lambda: seen.append(graph(torch.ones(2)).tolist()), daemon=True)
        thread.start()
        thread.join(20)
    assert not thread.is_alive()
    assert seen[-1] == [2.0] * 2


def test_tensors_given_twice_are_a_signature_of_their_own(counter):
    graph = compile_graph(lambda x, y: x * y, SolverConfig(graph="spectral", recompile_limit=3))
    x, y = torch.ones(3), torch.ones(3)
    for _ in range(2):
        graph(x, y)
        graph(x, x)
    assert counter.frame_count == graph.compilations == 2


def test_host_settings_stay_as_they_were(counter):
    known = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit",
             "assume_static_by_default", "automatic_dynamic_shapes")
    before = {name: getattr(torch._dynamo.config, name) for name in known}
    with compiled.recompile_limits(50):
        assert torch._dynamo.config.recompile_limit == 50
    assert before == {name: getattr(torch._dynamo.config, name) for name in known}
    compile_graph(lambda x: x + 1, SolverConfig(graph="spectral", recompile_limit=50))(torch.ones(3))
    assert before == {name: getattr(torch._dynamo.config, name) for name in known}


def test_a_graph_break_is_an_error(counter):
    def breaks(x):
        print("a side effect")
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_graph(breaks, SolverConfig(graph="spectral"))(torch.ones(3))


def test_dynamic_serves_many_shapes_with_few_graphs(counter):
    graph = compile_graph(lambda x: x * 2 + 1, SolverConfig(graph="spectral", dynamic=True))
    for size in range(2, 30):
        assert torch.equal(graph(torch.ones(size)), torch.full((size,), 3.0))
    assert counter.frame_count == 1


def test_uncompiled_is_the_function_itself():
    function = spectral.spectral_graph(torch.float32)
    assert compile_graph(function, SolverConfig(graph="spectral", compile=False)) is function


def test_mode_and_options_reach_torch_compile():
    assert compiled.inductor_arguments(SolverConfig()) == {}
    assert compiled.inductor_arguments(SolverConfig(mode="max-autotune")) == {"mode": "max-autotune"}
    options = {"combo_kernels": True}
    assert compiled.inductor_arguments(SolverConfig(options=options)) == {"options": options}


def test_replayed_results_are_copied():
    """A CUDA graph's buffers are written again by the next call."""
    assert compiled.replays_cuda_graphs(SolverConfig(mode="reduce-overhead"))
    assert compiled.replays_cuda_graphs(SolverConfig(options={"triton.cudagraphs": True}))
    assert not compiled.replays_cuda_graphs(SolverConfig(mode="max-autotune-no-cudagraphs"))
    graph = CompiledGraph(lambda x: x, SolverConfig(mode="reduce-overhead"))
    x = torch.ones(2)
    graph.graphs[compiled.signature((x,))] = graph.function
    assert graph(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize(("variable", "lack"), [("no-such-compiler", "no C.. compiler"), (None, "Python's headers")])
def test_a_missing_toolchain_is_logged_and_runs_uncompiled(monkeypatch, caplog, tmp_path, forgetful, variable,
                                                           lack):
    if variable:
        monkeypatch.setenv("CXX", variable)
    else:
        monkeypatch.setattr(compiled.shutil, "which", lambda name: "/usr/bin/g++")
        monkeypatch.setattr(compiled.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    missing_toolchain.cache_clear()
    try:
        path = right_angle.build(SolverConfig(), CPU)
        assert path is right_angle.convolve
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert re.search(lack, caplog.text)
        tensors = inputs(2, 1, 2, 16)
        assert right(path(*tensors), tensors)
    finally:
        missing_toolchain.cache_clear()


@needs_compiler
@pytest.mark.slow
def test_inductor_on_the_cpu():
    """Both paths through Inductor itself: one even, one odd and one single-row batch."""
    for name, path in {"spectral": spectral.build(SolverConfig(graph="spectral"), 16, CPU),
                       "right-angle": right_angle.build(SolverConfig(), CPU)}.items():
        for batch in (1, 4, 3):
            tensors = inputs(batch, 1, 2, 16)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                assert right(path(*tensors), tensors), (name, batch)
