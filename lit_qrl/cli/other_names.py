"""What options of TRL's `GRPOConfig` and verl's configuration are called here, for who types them."""

CLIP, KL = "model.objective.init_args.clip_", "model.objective.init_args.kl_coefficient"
MODEL, ROWS, ENGINE = "model.policy.init_args.model", "data.task.init_args.path", "data.engine.init_args."
RATE = "model.optimizer.init_args.lr"
ITERATIONS = "trainer.max_epochs, which counts iterations"
CORRECTION = "trainer.callbacks: configs/correction has files to add with --config"

OTHER_NAMES = {
    # TRL
    "beta": KL,
    "dataset_name": ROWS,
    "epsilon": f"{CLIP}low",
    "epsilon_high": f"{CLIP}high",
    "eval_steps": "trainer.check_val_every_n_epoch, in iterations",
    "generation_batch_size": "data.prompts_per_iteration, without the completions of each",
    "gradient_accumulation_steps": "data.micro_batches",
    "gradient_checkpointing": "model.policy.init_args.gradient_checkpointing",
    "greedy": "data.evaluation_greedy",
    "learning_rate": RATE,
    "loss_type": "model.objective: GRPO, DrGRPO and the others of configs/objective",
    "lr_scheduler_type": "model.lr_schedule",
    "mask_truncated_completions": "model.objective.init_args.mask_truncated",
    "max_completion_length": "data.max_completion_tokens",
    "max_grad_norm": "trainer.gradient_clip_val",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": ITERATIONS,
    "model_name_or_path": MODEL,
    "num_generations": "data.group_size",
    "num_iterations": "data.passes",
    "num_train_epochs": ITERATIONS,
    "output_dir": "trainer.default_root_dir",
    "per_device_eval_batch_size": "data.evaluation_size, problems of an evaluation",
    "per_device_train_batch_size": "data.prompts_per_iteration, prompts over all devices",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "ckpt_path",
    "save_steps": "checkpoint.every_n_iterations",
    "scale_rewards": "model.objective.init_args.scale",
    "seed": "seed_everything",
    "steps_per_generation": "data.mini_batches",
    "temperature": "data.temperature",
    "use_vllm": "data.engine: VLLMEngine",
    "vllm_gpu_memory_utilization": f"{ENGINE}gpu_memory_utilization",
    "vllm_importance_sampling_cap": CORRECTION,
    "vllm_importance_sampling_correction": CORRECTION,
    "vllm_mode": "data.engine: VLLMEngine is in the trainer's process, RemoteVLLMEngine in one of its own",
    "vllm_tensor_parallel_size": f"{ENGINE}tensor_parallel_size",
    "warmup_ratio": "model.warmup",
    # verl, by as many parts from the end as tell it from others
    "adv_estimator": "model.objective: GRPO, DrGRPO and the others of configs/objective",
    "clip_ratio": f"{CLIP}low and clip_high",
    "clip_ratio_high": f"{CLIP}high",
    "clip_ratio_low": f"{CLIP}low",
    "entropy_coeff": "model.objective.init_args.entropy_coefficient",
    "gpu_memory_utilization": f"{ENGINE}gpu_memory_utilization",
    "grad_clip": "trainer.gradient_clip_val",
    "kl_coef": KL,
    "kl_loss_coef": KL,
    "loss_agg_mode": "model.objective.init_args.reduction",
    "max_response_length": "data.max_completion_tokens",
    "model.path": MODEL,
    "norm_adv_by_std_in_grpo": "model.objective.init_args.scale",
    "optim.lr": RATE,
    "ppo_epochs": "data.passes",
    "ppo_max_token_len_per_gpu": "data.max_tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "data.micro_batches, their number",
    "ppo_mini_batch_size": "data.mini_batches, their number",
    "rollout.n": "data.group_size",
    "rollout_is": CORRECTION,
    "rollout_is_threshold": CORRECTION,
    "save_freq": "checkpoint.every_n_iterations",
    "tensor_model_parallel_size": f"{ENGINE}tensor_parallel_size",
    "test_freq": "trainer.check_val_every_n_epoch",
    "total_epochs": ITERATIONS,
    "train_batch_size": "data.prompts_per_iteration",
    "train_files": ROWS,
    "val_kwargs.n": "data.evaluation_samples",
    "val_kwargs.temperature": "data.evaluation_temperature",
}
"""The option here, and behind a comma or colon what else is to be known of it."""


def here(name: str) -> str | None:
    """Return what an option of others is here, as a sentence, or None for one that is not known.

    >>> here("--num_generations"), here("actor_rollout_ref.rollout.n"), here("data.rollout")
    ('Here it is data.group_size.', 'Here it is data.group_size.', None)
    """
    parts = name.lstrip("-").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((OTHER_NAMES[end] for end in ends if end in OTHER_NAMES), None)
    return found and f"Here it is {found}."
