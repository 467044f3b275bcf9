"""Words of other frameworks, answered with ours."""

from __future__ import annotations

_OURS = {
    "algorithm.group_size": "num_generations n n_samples_per_prompt repeat_times rollout_n num_rollouts num_samples "
    "group_n samples_per_prompt num_return_sequences",
    "explorer.max_tokens": "max_new_tokens max_completion_length max_response_length max_response_tokens "
    "response_length generate_max_len completion_length",
    "trainer.learning_rate": "lr actor_lr actor_learning_rate",
    "trainer.tasks_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size "
    "global_batch_size prompts_per_step tasks_per_batch num_prompts_per_step",
    "trainer.mini_batches": "ppo_mini_batch_size mini_batch_size num_mini_batches",
    "trainer.tokens_per_micro_batch": "micro_batch_size ppo_micro_batch_size_per_gpu gradient_accumulation_steps "
    "micro_train_batch_size max_token_len_per_gpu",
    "trainer.epochs": "ppo_epochs num_iterations num_ppo_epochs update_epochs",
    "tasks.epochs": "total_epochs num_train_epochs num_epochs",
    "trainer.steps": "max_steps total_steps total_training_steps num_steps train_steps iterations",
    "trainer.max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "trainer.save_every": "save_freq save_steps save_interval checkpoint_every",
    "trainer.warmup_steps": "warmup num_warmup_steps",
    "algorithm.kl": "kl_coef kl_coeff kl_loss_coef kl_penalty init_kl_coef beta use_kl_loss",
    "algorithm.entropy": "entropy_coeff entropy_coef entropy_bonus",
    "algorithm.policy_loss.clip_low and clip_high": "clip_range cliprange epsilon clip_ratio clip_eps eps_clip",
    "sync.every": "sync_interval sync_steps update_weights_interval",
    "sync.max_staleness": "max_off_policy staleness max_async_level staleness_threshold async_level sync_offset",
    "eval.every": "eval_interval test_freq eval_steps eval_freq",
    "tasks": "train_files dataset data taskset prompt_data train_dataset taskset_path",
    "tasks.workflow": "default_workflow_type workflow_type",
    "tasks.reward": "reward_fn reward_funcs default_reward_fn_type custom_reward_function reward_model",
    "model.path": "model_path model_name_or_path pretrain model_name",
    "runs_dir": "output_dir checkpoint_root_dir default_local_dir",
    "name": "experiment_name run_name",
    "explorer.max_rollouts": "concurrency max_concurrent_rollouts runner_per_model num_workers",
    "monitor.sinks": "logger report_to wandb tracker",
    "model.lora": "use_peft lora_rank lora_alpha peft_config",
    "eval.samples": "val_n eval_repeat_times",
}

WORDS = {word: ours for ours, words in _OURS.items() for word in words.split()}


def our_word(key: str) -> str | None:
    """Our dotted key for the last part of another framework's key, or None.

    `rollout.n`, `actor_rollout_ref.rollout.n` and `n` are all `algorithm.group_size`.
    """
    return WORDS.get(key.rpartition(".")[2].lower().lstrip("-"))
