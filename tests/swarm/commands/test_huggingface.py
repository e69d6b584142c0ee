"""A Hugging Face ``Trainer`` with our callback: the losses that it tells, its checkpoints, its best weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from peer import OuterLoop
from peer.api.examples import common, hf_trainer
from peer.api.huggingface import OuterLoopCallback


@dataclass
class Scene:
    """Trainings of a small model, each alone in its swarm."""

    folder: Path

    def train(
        self, steps: int, output: str, resume: Path | bool = False, checkpoint: Path | None = None, **more: Any
    ) -> tuple[OuterLoop, LlamaForCausalLM, list[Any]]:
        """The peer at its end, the trainer's model, and the losses that the peer was told."""
        from transformers import Trainer, TrainingArguments

        here = {"run.dir": str(self.folder), "peer.network.host": "127.0.0.1", "peer.metrics.port": 0}
        member = OuterLoopCallback(run="own", inner_steps=4, name="one", settings=here, checkpoint=checkpoint)
        told: list[Any] = []
        take = member._losses.take

        def watched() -> Any:
            told.append(take())
            return told[-1]

        member._losses.take = watched  # type: ignore[method-assign]
        arguments = TrainingArguments(
            output_dir=str(self.folder / output),
            max_steps=steps,
            save_steps=6,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **more,
        )
        data = hf_trainer.Blocks(common.text(0.01))
        few = torch.utils.data.Subset(data, range(4))
        trainer = Trainer(hf_trainer.network(), arguments, train_dataset=data, eval_dataset=few, callbacks=[member])
        trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
        assert member.outer is not None and isinstance(trainer.model, LlamaForCausalLM)
        return member.outer, trainer.model, told


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    pytest.importorskip("accelerate")
    return Scene(tmp_path)


def test_the_callback_tells_each_loss_and_resumes_with_the_trainer(scene: Scene) -> None:
    first, _, told = scene.train(6, "trainer")
    assert (first.swarm_step, first.round) == (6, 1)
    assert len(told) == 6 and all(4 < float(it) < 7 for it in told), told
    again, _, _ = scene.train(8, "trainer", resume=True)
    assert (again.swarm_step, again.round, again.adopted) == (8, 2, False)
    assert again.last is not None and again.last.step == 8


def test_a_checkpoint_of_another_folder_is_found_and_one_of_another_training_is_not_taken(scene: Scene) -> None:
    """It was looked for in ``output_dir`` only: none, or what another training had written at the same step."""
    scene.train(6, "first")
    scene.train(6, "second")
    first, moved = scene.folder / "first" / "checkpoint-6", scene.folder / "moved"
    assert scene.train(8, "third", resume=first)[0].round == 2
    shutil.move(first, moved)
    assert scene.train(8, "second", resume=moved, checkpoint=moved)[0].round == 2
    newcomer = scene.train(8, "second", resume=moved)[0]
    assert (newcomer.swarm_step, newcomer.round) == (2, 0)


def test_the_best_weights_that_a_trainer_loads_at_its_end_stay_as_they_are(scene: Scene) -> None:
    rate = {"learning_rate": 1e-3, "metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first one
    more = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 6, **rate}
    outer, model, _ = scene.train(12, "trainer", **more)
    assert outer.swarm_step == 12
    first, last = (LlamaForCausalLM.from_pretrained(scene.folder / "trainer" / f"checkpoint-{it}") for it in (6, 12))
    assert all(torch.equal(*both) for both in zip(first.parameters(), model.parameters(), strict=True))
    assert not all(torch.equal(*both) for both in zip(last.parameters(), model.parameters(), strict=True))
