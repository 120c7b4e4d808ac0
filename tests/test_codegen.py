"""`python -m bench.codegen`, and the library's own kernels under its audit."""

import itertools
import json
import re

import pytest

pytest.importorskip("triton")

import audit_kernels as kernels
from audit_kernels import attention, gather, products

from bench import codegen
from bench.audit.compilation import compile_request
from bench.audit.launches import other_requests
from bench.audit.report import audit_request
from jaxattn.kernels.triton.requests import compile_requests

AMD = ("gfx942", "gfx950")
ALL = (*AMD, "sm90")


@pytest.mark.parametrize("arch", ALL)
def test_page_tables_plans_cache_writes_and_mxfp4_products_are_safe(arch):
    launches = [launch for launch in other_requests(arch) if "every option" not in launch.name]
    names = {launch.fn.__name__ for launch in launches}
    in_tiles = {f"mxfp4_tiles{part}_kernel" for part in ("", "_added", "_input")} if arch == "sm90" else set()
    bookkeeping = {"page_table_kernel", "step_kernel", "cache_write_kernel"}
    assert names == bookkeeping | {"mxfp4_matmul_kernel"} | in_tiles
    for launch in launches:
        assert audit_request(launch, arch, tuned=False).failures == (), launch.name


def test_the_codes_of_mxfp4_tiles_do_not_pass_through_shared_memory():
    launches = [launch for launch in other_requests("sm90") if re.search(r"mxfp4_tiles(_sum)?$", launch.name)]
    assert len(launches) == 4
    for launch in launches:
        ttgir = compile_request(launch, "sm90").ttgir
        # The operand [warps, rows, 32]; that of the input ends with the tokens.
        codes = rf"tensor<{launch.num_warps}x\d+x32xbf16"
        assert re.search(rf"tt\.dot .*{codes}", ttgir)
        assert not re.search(rf"local_alloc .*{codes}", ttgir), launch.name


@pytest.mark.parametrize("arch", AMD)
def test_attention_with_every_option_is_safe(arch):
    launch = next(
        launch for launch in other_requests(arch) if launch.name == "verify, every option: attention"
    )
    report = audit_request(launch, arch, tuned=False)
    assert report.failures == ()
    assert not [note for note in report.notes if " reaches " in note]


@pytest.mark.parametrize("arch", ALL)
def test_a_tuned_decode_configuration_passes(arch):
    launch = next(
        launch for launch in compile_requests(arch) if launch.name.startswith("split D128 bfloat16 ")
    )
    assert audit_request(launch, arch).failures == ()


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "width"), [*itertools.product(AMD, [64, 128, 256, 512]), ("sm90", 128)])
def test_every_configuration_of_a_width_passes(arch, width, capsys):
    assert codegen.main(["--arch", arch, "--only", f"D{width} "]) == 0, capsys.readouterr().out


@pytest.fixture
def tuned(monkeypatch):
    """Let the command find these configurations instead of the tuned ones."""

    def use(*found):
        monkeypatch.setattr(codegen, "compile_requests", lambda arch: list(found))
        monkeypatch.setattr(codegen, "other_requests", lambda arch: [])
        monkeypatch.setattr(codegen, "pallas_launches", lambda arch: [])

    return use


def test_the_command_prints_a_table_and_succeeds(tuned, capsys):
    tuned(gather(kernels.gather_pages), attention(TILE=16))
    assert codegen.main(["--arch", "gfx950"]) == 0
    out = capsys.readouterr().out
    assert "gfx950: 160 KiB of shared memory" in out
    assert re.search(r"^gather_pages .* - +ok$", out, re.M)
    assert re.search(r"^attend .* 16( LDS)? +ok$", out, re.M)
    assert out.endswith("2 configurations, 0 failed\n")


def test_the_command_fails_with_one_line_for_each_failure(tuned, capsys):
    tuned(gather(kernels.gather_pages), gather(kernels.narrow_product, "*i32"))
    assert codegen.main(["--arch", "gfx942"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^narrow_product .* FAIL$", out, re.M)
    assert re.search(r"^FAIL gfx942 narrow_product: .*:\d+: an id from page_table reaches", out, re.M)
    assert out.endswith("2 configurations, 1 failed\n")


def test_the_command_reports_a_kernel_that_does_not_compile(tuned, capsys):
    tuned(products(size=24), gather(kernels.gather_pages))
    assert codegen.main(["--arch", "gfx942"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^FAIL gfx942 chained_products: does not compile: CompilationError: ", out, re.M)
    assert re.search(r"^gather_pages .* ok$", out, re.M)


def test_the_command_prints_json(tuned, capsys):
    tuned(gather(kernels.gather_pages), gather(kernels.gather_lanes))
    assert codegen.main(["--arch", "gfx942", "--only", "lanes", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["name"], report["arch"], report["failures"], report["load_bytes"]) == (
        "gather_lanes", "gfx942", [], None
    )  # fmt: skip


def test_the_command_fails_where_nothing_is_audited(tuned, capsys):
    tuned(gather(kernels.gather_pages))
    assert codegen.main(["--arch", "gfx942", "--only", "no such configuration"]) == 1
    assert "0 configurations" in capsys.readouterr().out
