"""One training step: problems, completions, rewards, advantages, and the updates that they are good for."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.api import linear_grpo_loss
from logitless.core.explanation import explain
from logitless.core.options import Head
from logitless.core.pytree import tree_of
from logitless.data.group_advantages import group_advantages
from logitless.train import train_mesh
from logitless.train.collect import collect, random_rollouts
from logitless.train.compiled_functions import Program
from logitless.train.config import NAIVE, ConfigError, TrainConfig, loss_backend, objective_of
from logitless.train.head_calls import head_options
from logitless.train.lora import init_lora
from logitless.train.model import in_compute_dtype, param_shapes
from logitless.train.packed import PackedBatch, make_packed_score, make_packed_update, pack_batch, slots_of
from logitless.train.recorded import load_rollouts, sample_weights
from logitless.train.rollout import Completions, Sampling, generate
from logitless.train.run_records import Rollouts, step_record
from logitless.train.sampler import load_sampler
from logitless.train.task import Prompts, Task
from logitless.train.update import (
    Batch,
    Policy,
    State,
    learning_rate,
    make_optimizer,
    make_score,
    make_update,
    whole_policy,
)

_copies = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))  # one program: a compilation for each shape adds up
_LORA = 2  # what the seed's key is folded with; collect.py has 1


class Trainer:
    """Everything that a step needs, compiled once. The trainer keeps no run state: :class:`State` does."""

    def __init__(self, config: TrainConfig, task: Task):
        self.config, self.task = config, task
        self.objective = objective_of(config)
        self.mesh = train_mesh.make_mesh(config) if train_mesh.devices_needed(config) > 1 else None
        self.backend = self._backend_name()
        self.key = jax.random.key(config.seed)
        self.times: dict[str, float] = {}
        optimizer = make_optimizer(config)
        self._rate = learning_rate(config)
        self._init_optimizer = jax.jit(optimizer.init)
        self.packed = config.train.packing != "off"
        makers = (make_packed_update, make_packed_score) if self.packed else (make_update, make_score)
        update = makers[0](config, task.model, self.objective, optimizer)

        def update_in_place(state: State, frozen: Policy, batch: Any) -> tuple[State, dict[str, Any]]:
            state, info = update(state, frozen, batch)
            return train_mesh.keep_layout(state, self.mesh), info

        self.update_program = Program("update", update_in_place, donate=(0,))
        self.score_program = Program("score", makers[1](config, task.model, self.objective))
        r = config.rollout
        dtype = jnp.dtype(config.model.compute_dtype)
        self.sampling = Sampling(
            r.max_completion_tokens, r.temperature, r.top_p, config.train.group_size, task.eos_ids, task.pad_id,
            self.objective.temperature_on, r.top_k,
        )  # fmt: skip
        # A run evaluates a few times: one stage is a seventh of the program, and costs tenths of a second each time.
        greedy = dataclasses.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, group_size=1, stages=1)
        make = partial(generate, config=task.model, compute_dtype=dtype)
        self.rollout_program = Program("rollout", partial(make, sampling=self.sampling))
        self.eval_program = Program("eval", partial(make, sampling=greedy))
        self.sampler = load_sampler(config) if r.sampler and not r.replay else None
        if r.replay:
            self._recorded(1)  # what cannot be replayed is said before anything compiles
        updates = config.train.inner_epochs * config.train.minibatches
        self._needs_old = updates > 1
        self._needs_ref = self.objective.beta is not None or config.train.kl_report
        self.sample_weights = jax.jit(sample_weights)

    def _backend_name(self) -> str:
        """Which backend the losses of this run take, ``auto`` resolved; what the library cannot do is said here."""
        c, m = self.config, self.task.model
        if loss_backend(c) == NAIVE:
            return NAIVE
        rows = c.train.microbatch or c.train.prompts_per_step * c.train.group_size // c.train.minibatches
        width = c.rollout.max_completion_tokens if c.train.packing == "off" else slots_of(c)
        dtype, k = jnp.dtype(c.model.compute_dtype), c.rollout.top_k
        if k > m.vocab_size:
            raise ConfigError(f"rollout.top_k: {k}, more than the vocabulary of {m.vocab_size}")
        try:
            return explain(
                linear_grpo_loss,
                jax.ShapeDtypeStruct((rows, width, m.hidden_size), dtype),
                tree_of(Head, jax.ShapeDtypeStruct((m.vocab_size, m.hidden_size), dtype), layout="vh"),
                support=jax.ShapeDtypeStruct((rows, width, k), jnp.int32) if k else None,
                objective=self.objective,
                sharding=train_mesh.loss_sharding(c),
                options=head_options(c, sparse_backward=c.train.loss.sparse_backward),
            ).backend
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"train.loss: {error}") from None

    def traced(self, step: int) -> bool:
        """Whether the step is kept for a comparison with another loss (recorded.py)."""
        return step <= self.config.rollout.record or bool(self.config.rollout.replay)

    # -- state ------------------------------------------------------------------------------------------------------

    def initial(self, params: Any) -> tuple[State, Policy]:
        """State and frozen part at step 0. The frozen part also serves as the reference policy, so that without LoRA
        it is a second copy of the weights, kept only where the KL is asked for."""
        lora_config = self.config.model.lora
        if lora_config.rank:
            lora = init_lora(
                self.task.model,
                lora_config.rank,
                jax.random.fold_in(self.key, _LORA),
                targets=lora_config.targets,
                alpha=lora_config.alpha,
            )
            trained = Policy(None, train_mesh.place_weights(lora, self.mesh))
            frozen = Policy(train_mesh.place_weights(params, self.mesh), None)
        else:
            # A state is donated to its update: what is trained must not share memory with what is kept.
            trained = Policy(_copies(train_mesh.place_weights(params, self.mesh)), None)
            dtype = jnp.dtype(self.config.model.compute_dtype)
            reference = in_compute_dtype(params, dtype) if self._needs_ref else None
            frozen = Policy(None if reference is None else train_mesh.place_weights(reference, self.mesh), None)
        return State(trained, train_mesh.place_weights(self._init_optimizer(trained), self.mesh)), frozen

    def like(self) -> tuple[State, Policy]:
        """What :meth:`initial` returns, as shapes: enough to compile, before there are weights."""
        dtype = jnp.dtype(self.config.model.master_dtype)
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype),
            param_shapes(self.task.model),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        return jax.eval_shape(self.initial, params)

    def compile(self, state: State, frozen: Policy) -> None:
        """Compile every program of a step, side by side: what cannot be compiled fails before the first rollout.

        Over a mesh it is left to the first calls, whose arguments know their layouts.
        """
        if self.mesh is not None:
            return
        t, r = self.config.train, self.config.rollout
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, frozen))
        state, frozen = like
        params, lora = whole_policy(state.trained, frozen)
        jobs: list[tuple[Any, ...]] = []
        rows = t.prompts_per_step * t.group_size

        rolled = random_rollouts(self.config, 1, 0)  # only shapes matter

        def batch(count: int, *logp: str) -> Any:
            given = self._host_batch(rolled, rolled.rewards).rows(0, count)
            given = given.with_logp(**dict.fromkeys(logp, np.asarray(rolled.completions.logp)[:count]))
            empty: Any = pack_batch(self.config, self.objective, given, skip=False) if self.packed else given
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty)

        def prompts(count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
            """Arguments for a sampling program, after its weights."""
            shape, key = (count, r.max_prompt_tokens), self.key
            kinds = ((shape, jnp.int32), (shape, jnp.bool_), (key.shape, key.dtype), ((), jnp.int32))
            return tuple(jax.ShapeDtypeStruct(*kind) for kind in kinds)

        sampled = r.kind == "sample"
        if sampled and not r.replay and self.sampler is None:
            jobs.append((self.rollout_program, params, lora, *prompts((r.rows or rows) // t.group_size)))
        if sampled and self.config.eval.every:
            jobs.append((self.eval_program, params, lora, *prompts(self._evaluated_at_once())))
        scored = batch(rows)
        if self._needs_old or self.traced(1):
            jobs.append((self.score_program, params, lora, scored))
        if self._needs_ref:
            jobs.append((self.score_program, frozen.params, None, scored))
        base = frozen if state.trained.params is None else Policy(None, None)
        for old in (False, True)[: 1 + self._needs_old]:
            part = batch(rows // t.minibatches, *["old_logp"] * old, *["ref_logp"] * self._needs_ref)
            jobs.append((self.update_program, state, base, part))
        with ThreadPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
            for done in [pool.submit(program.compile, *args) for program, *args in jobs]:
                done.result()

    # -- phases -----------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """What happens inside is a phase of the step."""
        start, compiled = time.perf_counter(), self._compile_seconds()
        yield
        seconds = time.perf_counter() - start - (self._compile_seconds() - compiled)
        self.times[phase] = self.times.get(phase, 0.0) + seconds

    def rollouts(self, state: State, frozen: Policy, step: int) -> Rollouts:
        """A step's problems with their completions and rewards; the same for the same state, seed and step."""
        c = self.config
        if c.rollout.kind == "random":
            with self.timed("rollout"):
                return random_rollouts(c, self.task.model.vocab_size, step)
        if c.rollout.replay:
            with self.timed("rollout"):
                return self._recorded(step)
        return collect(self, state, frozen, step)

    def _recorded(self, step: int) -> Rollouts:
        c, r = self.config, self.config.rollout
        rows, widths = c.train.prompts_per_step * c.train.group_size, (r.max_prompt_tokens, r.max_completion_tokens)
        return load_rollouts(Path(r.replay), step, rows, widths, self.task.model.vocab_size)

    def step(self, state: State, frozen: Policy, step: int) -> tuple[State, dict[str, Any], Rollouts]:
        """Step number ``step`` (from 1): the new state, its record, and the completions behind it."""
        c, t = self.config, self.config.train
        self.times = {}
        begin = time.perf_counter()
        compiled = self._compile_seconds()
        rolled = self.rollouts(state, frozen, step)
        done = rolled.completions
        scale: Any = t.advantage_scale
        advantages = group_advantages(jnp.asarray(rolled.rewards), t.group_size, scale=scale, eps=t.advantage_eps)
        host = self._host_batch(rolled, np.asarray(advantages))
        batch = host if self.packed else train_mesh.place_rows(host, self.mesh)
        record: dict[str, Any] = {"step": step}
        with self.timed("score"):
            params, lora = whole_policy(state.trained, frozen)
            old = self._score(params, lora, batch) if self._needs_old else None
            if self._needs_ref:
                reference = frozen.params if frozen.params is not None else params
                batch = batch.with_logp(ref_logp=self._score(reference, None, batch))
            jax.block_until_ready((old, batch.ref_logp))
        if self.traced(step):
            with self.timed("trace"):  # no part of the step's time: other runs do without
                rolled.trainer_logp = np.asarray(self._score(params, lora, batch) if old is None else old)
        comparable = self.sampler is None or self.objective.temperature_on == "logits"
        if old is not None and c.rollout.kind == "sample" and comparable:
            known = done.mask & ~np.isnan(done.logp)
            gap = np.abs(np.where(known, np.asarray(old) - done.logp, 0.0))
            record["rollout/logp_gap_max"] = float(gap.max())
        state, updates = self._updates(state, frozen, batch, old)
        record.update(step_record(rolled, updates, t.group_size, self.task.eos_ids), **rolled.notes)
        record["train/learning_rate"] = float(self._rate(np.int32((step - 1) * len(updates))))
        seconds = time.perf_counter() - begin - self.times.pop("trace", 0.0)
        compiled = self._compile_seconds() - compiled
        for phase, value in self.times.items():
            record[f"time/{phase}_s"] = value
        record["time/train/step_s"] = seconds - compiled
        live = float(done.mask.sum())
        record["throughput/completion_tokens_per_s"] = live / record["time/train/step_s"]
        record["throughput/update_tokens_per_s"] = live * len(updates) / self.times["update"]
        return state, record, rolled

    def _host_batch(self, rolled: Rollouts, advantages: np.ndarray) -> Batch:
        """The completions as the updates take them."""
        prompts, done = rolled.prompts, rolled.completions
        logp = done.logp if self.config.rollout.kind == "sample" else None
        batch = tree_of(Batch, prompts.tokens, prompts.valid, done.tokens, done.mask, advantages, logp)
        return batch if done.support is None else batch.with_logp(support=done.support)

    def _packed(self, batch: Batch, skip: bool) -> PackedBatch:
        packed = pack_batch(self.config, self.objective, batch, skip)
        return train_mesh.place_micro_batches(packed, self.mesh)

    def _score(self, params: Any, lora: Any, batch: Batch) -> Any:
        """Log-probabilities of the batch's completions; of a batch that will be packed, on the host."""
        if not self.packed:
            return self.score_program(params, lora, batch)
        return np.asarray(self.score_program(params, lora, self._packed(batch, skip=False)))

    def _updates(self, state: State, frozen: Policy, batch: Batch, old: Any) -> tuple[State, list[dict[str, Any]]]:
        """All optimiser updates of a step. The first one has no old log-probabilities: it is on-policy."""
        t = self.config.train
        rows = t.prompts_per_step * t.group_size // t.minibatches
        updates = []
        with self.timed("update"):
            # The reference policy, if any, is not updated.
            base = frozen if state.trained.params is None else Policy(None, None)
            for i in range(t.inner_epochs * t.minibatches):
                part = batch if i == 0 else batch.with_logp(old_logp=old)
                if t.minibatches > 1:
                    part = part.rows(i % t.minibatches * rows, rows)
                state, info = self.update_program(
                    state, base, self._packed(part, skip=t.skip_rows) if self.packed else part
                )
                updates.append(info)
            updates = jax.device_get(updates)
        return state, updates

    def completions(
        self, program: Program, params: Any, lora: Any, prompts: Prompts, key: Any, at_once: int, group_size: int
    ) -> Completions:
        """A sampling program's completions of the prompts, on the host; so many prompts in a call. The last call
        repeats some first prompts, so a single program suffices."""
        count, parts = len(prompts.tokens), []
        for start in range(0, count, at_once):
            rows = np.arange(start, start + at_once) % count
            tokens, valid = train_mesh.place_rows((prompts.tokens[rows], prompts.valid[rows]), self.mesh)
            parts.append(program(params, lora, tokens, valid, key, jnp.int32(start * group_size)))
        host = [jax.device_get(part) for part in parts]
        return jax.tree.map(lambda *x: np.concatenate(x)[: count * group_size], *host)

    def evaluate(self, state: State, frozen: Policy) -> tuple[dict[str, Any], Rollouts]:
        """Greedy completions of the held-out problems."""
        start, compiled = time.perf_counter(), self._compile_seconds()
        problems = self.task.held_out
        prompts = self.task.encode(problems)
        params, lora = whole_policy(state.trained, frozen)
        at_once = self._evaluated_at_once()
        completions = self.completions(self.eval_program, params, lora, prompts, self.key, at_once, 1)
        texts = self.task.decode(completions)
        rewards, parts = self.task.rewards(texts, problems)
        record = {"eval/reward": float(rewards.mean()), "eval/length_mean": float(completions.mask.sum(1).mean())}
        record.update({f"eval/{name}": value for name, value in parts.items()})
        record["time/eval_s"] = time.perf_counter() - start - (self._compile_seconds() - compiled)
        return record, Rollouts(prompts, completions, rewards, parts, texts)

    def _evaluated_at_once(self) -> int:
        """Held-out problems of one call: as many as a step has completions."""
        return min(len(self.task.held_out), self.config.train.prompts_per_step * self.config.train.group_size)

    def _compile_seconds(self) -> float:
        programs = (self.rollout_program, self.eval_program, self.score_program, self.update_program)
        return sum(p.compile_s for p in programs)
