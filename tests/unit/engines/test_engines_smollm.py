"""The fast path over a real model: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_engines import at, generate_all, hf_logprobs, make_engine, run

FOLDER = Path(__file__).parents[3] / ".cache" / "smollm2-135m"


@pytest.mark.smollm
@pytest.mark.slow
def test_smollm_is_served_as_hugging_face_would():
    if not FOLDER.exists():
        pytest.skip("python -m benchmarks.smollm brings the model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    questions = ["What is 2 + 3? Answer with the number only.", "Name a colour."]
    asked = [
        np.array(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"],
            dtype=np.int32,
        )
        for text in questions
    ]

    async def check():
        engine = await make_engine(model, tokenizer)
        assert engine.is_fast
        for prompt, done in zip(asked, await generate_all(engine, asked, max_tokens=8, temperature=0.7), strict=True):
            expected = at(hf_logprobs(model, prompt, done.tokens, 0.7), done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-3)
        low = await make_engine(model, tokenizer, dtype="bfloat16")
        assert low.dtype == "bfloat16"

    run(check())
