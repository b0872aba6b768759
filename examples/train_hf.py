"""Train a transformer with Hugging Face's Trainer, from a configuration: no weights and no data are downloaded.

Needs ``pip install transformers accelerate``. The sequences count upwards in steps that the model must find out; they
are of different lengths, and each batch is padded to its longest, as the collator does it.

    python examples/train_hf.py --steps 200
    autofuse run examples/train_hf.py --steps 200
"""

import argparse
import os
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCABULARY, PAD = 128, 0


class Counting(Dataset):
    def __init__(self, count, longest):
        generator = torch.Generator().manual_seed(1)
        self.rows = []
        for _ in range(count):
            length = int(torch.randint(longest // 4, longest + 1, (), generator=generator))
            start, stride = (int(torch.randint(1, 32, (), generator=generator)) for _ in range(2))
            self.rows.append((start + stride * torch.arange(length)) % (VOCABULARY - 1) + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PAD)
    mask = ids != PAD
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


class Losses(TrainerCallback):
    """Prints what the trainer logs, and how long a step takes."""

    def __init__(self):
        self.spent, self.began = 0.0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.spent += time.perf_counter() - self.began

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            print(f"step {state.global_step} loss {float(logs['loss'])!r}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=options.longest,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        bos_token_id=PAD,
        eos_token_id=PAD,
        pad_token_id=PAD,
    )
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=5e-4,
            logging_steps=options.log_every,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = Counting(512, options.longest)
        trainer = Trainer(GPT2LMHeadModel(config), arguments, data_collator=collate, train_dataset=data)
        trainer.add_callback(losses)
        trainer.train()
    print(f"milliseconds a step {losses.spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
