"""Every command with wrong input in each of its arguments: one line that names it, exit code 2, and no work before."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logitless.lab import cli, exits

MODEL = "--model qwen2.5-7b"
SHAPE = "--hidden 16 --vocab 16"
WRONG = {
    "demo": """
        --quick --tokens x                      -> argument --tokens: invalid int value: 'x'
        --quick --vocab -1                      -> --vocab -1, expected at least 8
        --quick --seed 99999999999999999999     -> --seed 99999999999999999999, expected at most 4294967295
        --out FILE                              -> FILE: is a file, expected a folder
        --out FILE/x                            -> FILE: is a file, expected a folder
        --tokens 0                              -> --tokens 0, expected at least 8
        --hidden 2                              -> --hidden 2, expected at least 8
        --seed -1                               -> --seed -1, expected at least 0
    """,
    "gradcheck": """
        --config nope                           -> nope: no such configuration file; `logitless configs` lists
        --config LIST                           -> LIST: expected keys and values, found a list
        --config BROKEN                         -> BROKEN: not readable as YAML: while parsing a flow sequence
        --config FOLDER                         -> Is a directory
        batch=0                                 -> batch: 0, expected at least 1
        batch=x                                 -> 'batch': Value 'x' of type 'str' could not be converted to Integer
        tokens=-1                               -> tokens: -1, expected at least 1
        dtype=float8                            -> dtype: 'float8', expected one of
        backend=cuda                            -> backend: 'cuda', expected one of auto, pallas_tpu
        backend=mosaic_gpu                      -> backend: mosaic_gpu runs on a GPU, but the default device here is a
        bwd_impl=cuda                           -> bwd_impl: 'cuda', expected one of pallas, jax
        level=foo                               -> level: 'foo', expected one of head, logits
        seed=-1                                 -> seed: -1, expected 0 to 4294967295
        layers=-1                               -> layers: -1, expected at least 0
        timeout_s=0                             -> timeout_s: 0, expected at least 1
        nope=1                                  -> 'nope'
        inputs=foo                              -> inputs: 'foo', expected one of
        inputs=model                            -> inputs: 'model' needs model=NAME or a path
        inputs=model model=nope                 -> model: 'nope' is neither an architecture
        mesh=foo                                -> mesh 'foo': 'foo' is not an axis
        mesh=data=3                             -> batch: 2 rows do not split over data x fsdp = 3 devices
        objective=foo                           -> 'objective'
        objective.policy=foo                    -> policy='foo' is not known
        sparse_backward=7                       -> sparse_backward: 7, expected off, auto or
        out=FOLDER                              -> FOLDER: is a folder, expected the name of a file
        wandb_mode=foo                          -> wandb_mode: 'foo', expected one of disabled, offline, online
        wandb_mode=online                       -> wandb_mode: online needs wandb: pip install 'logitless[wandb]'
        =                                       -> override '='
        a                                       -> override 'a': expected key=value
        sed=1                                   -> Did you mean 'seed'
        seed=one                                -> 'seed'
        backend=chunkd                          -> Did you mean 'chunked'
        preset=trll                             -> Did you mean 'trl'
        objective.polcy=clip                    -> Did you mean 'policy'
        tokens=0                                -> tokens: 0, expected at least 1
        model=tiny                              -> needs inputs=model
        vocab_size=61 vocab=60                  -> vocab_size: 61, expected 0 (all) to 60
        call=logp                               -> call: 'logp', expected one of loss, logprobs
        level=logits inputs=realistic           -> are for level=head
        level=logits sparse_backward=auto       -> are for level=head
    """,
    "bench": """
        --config nope                           -> nope: no such configuration file
        --suite nope                            -> suite 'nope' is not known; expected one of cpu, h200
        --suite cpu --only nope                 -> suite 'cpu' has no case with 'nope' in its name
        --suite cpu --out FOLDER                -> FOLDER: is a folder, expected the name of a file
        --suite cpu foo=1                       -> 'foo=1': with --suite, expected one of
        --suite cpu rounds=x                    -> 'rounds=x': expected a whole number
        --suite cpu --config cpu_head_small     -> --suite takes no configuration
        --arms nope                             -> --arms nope: expected (parts of) some of
        --against nope                          -> --against nope: no src/logitless in it
        --peers nope                            -> --peers nope: no such folder
        --only x                                -> --only and --out are for --suite
        tokens=0                                -> tokens: 0, expected at least 1
        rows=0                                  -> rows: 0, expected at least 1
        rows=7                                  -> tokens: 1024 do not split into 7 rows
        level=foo                               -> level: 'foo', expected one of head, logits
        dtype=int3                              -> dtype: 'int3', expected one of float32
        logits_dtype=int3                       -> logits_dtype: 'int3', expected one of
        head_grad_dtype=int3                    -> head_grad_dtype: 'int3', expected one of
        rounds=0                                -> rounds: 0, expected at least 1
        timeout_s=0                             -> timeout_s: 0, expected at least 1
        live=2                                  -> live: 2.0, expected a number in (0, 1]
        model=nope                              -> model: 'nope', expected one of qwen2.5-0.5b
        kernel.backend=cuda                     -> kernel.backend: 'cuda', expected one of nothing, pallas_tpu
        baselines=[foo]                         -> baselines: 'foo', expected some of naive, strong
        batch_kind=foo                          -> batch_kind: 'foo', expected one of uniform, rl
        inputs=foo                              -> inputs: 'foo', expected one of flat, realistic, on_policy, real
        gates=3                                 -> 'gates'
        wandb_mode=online                       -> pip install 'logitless[wandb]'
        kernel.enbled=true                      -> Did you mean 'kernel.enabled'
        baselines=[strong/f8]                   -> baselines: 'strong/f8'
        logits_dtype=float16                    -> logits_dtype: 'float16'
        arms.x.of=kernels                       -> arms.x.of: 'kernels', expected copy or one of naive, strong, default
        arms.x.optins=1                         -> arms.x: 'optins' is not known
        gates.x=[time,default,best,1.0]         -> names the arm 'best'
        kernel.sparse_backward=often            -> kernel.sparse_backward
        --suite cpu peaks=1                     -> expected true or false
        --suite cpu --out /dev/null/x.json      -> cannot be written
        inputs=real                             -> states
    """,
    "plan": f"""
        --model nope                            -> --model 'nope' is not known
        {MODEL} --hidden 3                      -> give --model, or --hidden and --vocab, not both
        --hidden 0 --vocab 1                    -> --hidden 0, expected at least 1
        --hidden 16                             -> give --model, or --hidden and --vocab
        {MODEL} --chip nope                     -> chip 'nope' is not known
        {MODEL} --mesh data=2                   -> --mesh and --reserve-gb need --chip
        {MODEL} --chip v6e --mesh foo           -> 'foo' is not an axis
        {MODEL} --chip v6e --mesh data=3        -> 8192 tokens do not split over data x fsdp = 3 chips
        {MODEL} --tokens 0                      -> --tokens 0, expected at least 1
        {MODEL} --live-tokens -1                -> live_tokens=-1, expected 0 to 8192
        {MODEL} --reserve-gb nan --chip v6e     -> --reserve-gb nan, expected at least 0, and finite
        {MODEL} --backend cuda                  -> backend='cuda' is not known
        {MODEL} --chunk-size 0                  -> chunk_size=0, expected a positive Python int
        {MODEL} --memory-budget 0               -> memory_budget=0, expected a positive Python int
        {MODEL} --sparse-backward foo           -> sparse_backward='foo', expected 'off', 'auto' or
        {MODEL} --active-columns 3              -> active_columns=3.0 is for a sparse backward
        {MODEL} --dtype foo                     -> argument --dtype: invalid choice: 'foo'
        {MODEL} foo=1                           -> foo is not known
        {MODEL} foo                             -> 'foo' is no option
        {MODEL} --out FOLDER                    -> FOLDER: is a folder
        {MODEL} --chip v6                       -> Did you mean 'v6e'
        {MODEL} --chip v6e --mesh tensor=7      -> does not split over tensor
        {MODEL} lora_rank=0                     -> lora_rank=0, expected a positive
        {MODEL} --memory-budget 10              -> memory_budget=10 bytes is less
        {MODEL} --backend pallas_tpu            -> runs on a TPU
        {MODEL} --chip v6e --reserve-gb -1      -> expected at least 0
        {MODEL} sparse_bckward=auto             -> did you mean sparse_backward?
        {MODEL} tokens=many                     -> tokens=many: invalid int value: 'many'
        {MODEL} frozen_head=1                   -> frozen_head=1, expected frozen_head=true or
        {MODEL} active_columns=0.1              -> give sparse_backward='auto' with it
    """,
    "tpu": f"""
        compile                                 -> give --model, or --hidden and --vocab
        compile --model nope                    -> --model 'nope' is not known
        compile --topology v9:2x4 {MODEL}       -> --topology 'v9:2x4': the chip 'v9' is not one of v2, v3, v4, v5e
        compile --topology v6e:3x5 {MODEL}      -> hosts have 2x2 chips
        compile --topology v6e:0x4 {MODEL}      -> --topology 'v6e:0x4', expected a slice such as v6e:2x4
        compile --topology v6e {MODEL}          -> --topology 'v6e', expected a slice such as v6e:2x4
        compile --hidden 0 --vocab 1            -> --hidden 0, expected at least 1
        compile {SHAPE} --tokens 0              -> --tokens 0, expected at least 1
        compile {SHAPE} --mesh foo              -> 'foo' is not an axis
        compile {SHAPE} --mesh data=100         -> --mesh data=100 needs 100 chips, and v6e:2x4 has 8
        compile {SHAPE} --tokens 9 --mesh data=2 -> --tokens 9 do not split over data x fsdp = 2
        compile --hidden 16 --vocab 17 --mesh tensor=2 -> --vocab 17 does not split over tensor x fsdp
        compile {SHAPE} --level foo             -> argument --level: invalid choice: 'foo'
        compile {SHAPE} --out FOLDER            -> FOLDER: is a folder
        cycles {MODEL} --tokens 99999           -> Give fewer --tokens or a smaller --vocab
        cycles {SHAPE} --topology v5e:2x4       -> clock and bandwidth are known for v6e:2x4 only
        cycles {SHAPE} --for-tokens -1          -> --for-tokens -1, expected at least 1
        compile --topology '8 chips' {SHAPE}    -> expected a slice such as v6e:2x4
        compile {MODEL} --vocab 3               -> not both
        cycles --model qwen2.5-72b --tokens 1024 -> million cycles
        compile --hidden 128 --vocab 0          -> --vocab 0, expected at least 1
    """,
    "report": """
        nope                                    -> nope: no such file
        FOLDER                                  -> FOLDER: no results of gradcheck
        HALF                                    -> HALF: line 1 is not JSON
        HALF --out FOLDER                       -> FOLDER: is a folder, expected the name of a file
    """,
    "train": """
        --config nope                           -> nope: no such configuration file
        --config LIST                           -> LIST: expected keys and values, found a list
        --config BROKEN                         -> BROKEN: not readable as YAML
        --config tiny --resume FOLDER           -> leave out --config
        --resume FOLDER                         -> FOLDER holds no run to continue
        foo                                     -> override 'foo': expected key=value
        foo=1                                   -> 'foo'
        seed=99999999999999999999               -> seed: 99999999999999999999, expected 0 to 4294967295
        run_dir=FILE                            -> FILE cannot be written
        train.steps=x                           -> 'train.steps'
        model.weights=nope                      -> no model at nope: expected a hub folder, a .gguf file
        model.weights=FOLDER                    -> FOLDER: holds no tokenizer.json
        model.weights=HALF                      -> HALF: is a file; expected a folder of a hub's model
        model.architecture=nope                 -> model.architecture: 'nope', expected one of
        model.tokenizer=nope                    -> no model at nope
        model.cache_dir=FILE model.weights=smollm2-135m -> no model at smollm2-135m
        model.lora.targets=[foo]                -> model.lora.targets: ['foo'], expected some of q, k, v
        data.kind=gsm8k data.path=nope          -> nope: no such file; expected GSM8K as JSONL
        data.kind=gsm8k data.path=HALF          -> HALF, line 1: not JSON
        data.limit=1000                         -> rollout.max_prompt_tokens: 6, but
        data.form=chat                          -> has no chat template; use bare prompts
        reward.kind=nope.py:foo                 -> reward 'nope.py:foo': importing nope.py failed
        rollout.replay=nope                     -> rollout.replay: nope has no recorded rollouts
        rollout.max_completion_tokens=1         -> rollout.max_completion_tokens: 1, but the answer
        train.loss.backend=cuda                 -> train.loss.backend: 'cuda', expected one of auto
        train.loss.backend=pallas               -> pallas has no kernels for a
        train.loss.backend=mosaic_gpu           -> backend='mosaic_gpu' runs on a GPU
        mesh.data=64                            -> mesh: 64 x 1 x 1 asks for 64 devices
        warm_start.cache=FILE                   -> FILE: is a file, expected a folder
        warm_start.steps=5 model.weights=FOLDER -> warm_start.steps: 5, but the supervised start is for random weights
        warm_start.steps=-1                     -> warm_start.steps: -1, expected at least 0
        wandb_mode=online                       -> wandb_mode: online needs wandb: pip install 'logitless[wandb]'
    """,
    "ab": """
        ab.kernel=foo                           -> ab.kernel: 'foo', expected one of
        ab.arms=3                               -> 'ab.arms'
        ab.arms.a.backend=chunked               -> ab.arms: only a; expected at least two arms
        ab.kernel=reference                     -> ab.kernel: both arms would use 'reference'
        --resume FOLDER                         -> FOLDER holds no run to continue
        --config nope                           -> nope: no such configuration file
    """,
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files and folders that are not what they are taken for, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # as if it were not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    files = {"FILE": "", "LIST": "- a\n- b\n", "BROKEN": "a: [1\n", "HALF": "{"}
    for name, text in files.items():
        (tmp_path / f"{name.lower()}.yaml").write_text(text)
    (tmp_path / "folder").mkdir()
    return {name: tmp_path / f"{name.lower()}.yaml" for name in files} | {"FOLDER": tmp_path / "folder"}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(
    command: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for i, line in enumerate(filter(None, map(str.strip, WRONG[command].splitlines()))):
        for name, path in places.items():
            line = line.replace(name, str(path))
        given, _, expected = (part.strip() for part in line.partition("->"))
        arguments = [command, *shlex.split(given)]
        if command in ("train", "ab") and "run_dir" not in given and "--resume" not in given:
            arguments.append(f"run_dir=run{i}")
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # argparse's own way
            code = stop.code  # type: ignore[assignment]
        said = capsys.readouterr()
        assert code == 2 and expected in said.err, (given, code, said.err)
        assert said.err.count(f"logitless {command}") >= 1 and said.err.endswith("\n"), said.err
        assert said.err.splitlines()[-1].startswith("logitless "), said.err  # the last line says it all


def test_what_finds_no_memory_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--quick", "--hidden", "99999999999"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("logitless demo: out of memory: Unable to allocate 373. ") and error.count("\n") == 1

    class JaxRuntimeError(RuntimeError):
        """As XLA's is called."""

    def full() -> Any:
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.\n  more")

    def other() -> Any:
        raise JaxRuntimeError("INTERNAL: something else")

    assert exits.run("bench", full) == 3
    assert capsys.readouterr().err.startswith("logitless bench: out of memory: RESOURCE_EXHAUSTED")
    with pytest.raises(JaxRuntimeError):
        exits.run("bench", other)


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_the_same_as_typed_by_a_user(command: str, tmp_path: Path) -> None:
    line = next(filter(None, map(str.strip, WRONG[command].splitlines())))
    given = shlex.split(line.partition("->")[0].replace("FOLDER", str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-m", "logitless", command, *given],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.startswith(("logitless", "usage"))
