"""A trainer on the stream: Flow-GRPO with LoRA on the diffusers transformer of the folder that a pipeline serves.

`meander-train --help` is the command; Network, Rollouts, Learner and the losses are its parts for loops of your own. It
needs torch, diffusers and peft: pip install 'meander-rl[train]'.
"""
