"""A trained checkpoint of one layout, exported, is the same model to transformers and to us."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.end_to_end.job import ROOT, metrics, run
from tests.megatron.rl.tiny import RUN_FLAGS, rollout_rows, write_llama, write_rollouts


def rescored(rows: list[dict], directory: Path) -> list[dict]:
    """The rows with the log-probs that transformers gives their responses."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    scored = []
    for row in rows:
        tokens = torch.tensor(row["tokens"])
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        predicted = log_probs[:-1].gather(1, tokens[1:, None]).squeeze(1)
        scored.append(row | {"rollout_log_probs": predicted[-row["response_length"] :].tolist()})
    return scored


def export(checkpoint: Path, output: Path, *more: str) -> None:
    tool = [sys.executable, "tools/export_hf.py"]
    arguments = ["--checkpoint", str(checkpoint), "--output", str(output), *more]
    subprocess.run([*tool, *arguments], check=True, cwd=ROOT, timeout=120)


def test_exported_weights_give_the_same_log_probs(tmp_path: Path) -> None:
    rows = rollout_rows()
    source = write_llama(tmp_path / "hf", dtype=torch.bfloat16)
    common = [*RUN_FLAGS, f"--hf-checkpoint={source}", "--rollout-batch-size=2"]
    trained = [
        *common,
        f"--rollout-data={write_rollouts(tmp_path / 'rollouts.jsonl', rows)}",
        "--tensor-model-parallel-size=2",
        "--sequence-parallel",
        "--micro-batch-size=8",
        f"--save={tmp_path}/save",
    ]
    code, said = run(trained, ranks=2, log=tmp_path / "log")
    assert code == 0, said

    exported = tmp_path / "exported"
    export(tmp_path / "save", exported, "--dtype", "float32")
    config = json.loads((source / "config.json").read_text())
    assert json.loads((exported / "config.json").read_text()) == config | {"dtype": "float32"}

    looked_at = [
        *common,
        f"--rollout-data={write_rollouts(tmp_path / 'scored.jsonl', rescored(rows, exported))}",
        "--micro-batch-size=16",
        f"--load={tmp_path}/save",
        "--finetune",
        f"--tensorboard-dir={tmp_path}/tb",
    ]
    code, said = run(looked_at, ranks=0, log=tmp_path / "log2")
    assert code == 0, said
    first = metrics(tmp_path / "tb")[0]
    assert first["train/train_rollout_logprob_abs_diff_max"] < 2e-5
    before = rescored(rows, source)
    changed = [
        abs(a - b)
        for row, old in zip(rescored(rows, exported), before, strict=True)
        for a, b in zip(row["rollout_log_probs"], old["rollout_log_probs"], strict=True)
    ]
    assert max(changed) > 1e-3

    export(tmp_path / "save", tmp_path / "rounded")
    assert json.loads((tmp_path / "rounded" / "config.json").read_text()) == config
    whole = load_file(exported / "model.safetensors")
    for name, rounded in load_file(tmp_path / "rounded" / "model.safetensors").items():
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, whole[name].bfloat16())
