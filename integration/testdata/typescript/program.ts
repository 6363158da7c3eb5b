// Publishes a prompt, follows its run, and prints what came of it, for TestTypeScript to compare with what is stored.
import { Client, numbers, RefusedError } from "./client.js";
import type { Prompt, Stamped } from "./client.js";

const client = await Client.connect({ servers: process.argv[2]! });
const prompt: Prompt = {
  prompt: "a red fox", uid: "p", group_size: 2, num_inference_steps: 4, height: 64, width: 64, seed: 5n,
  rollout: { sde_step_indices: [1], return_step_indices: [1, 2] }, reward: [{ name: "synthetic", weight: 2 }],
};
// @ts-expect-error: the prompt itself must be there
const missing: Prompt = { uid: "p" };
// @ts-expect-error: not one of the solvers
const other: Prompt = { prompt: "", rollout: { solver: "newton" } };

const receipt = await client.publish("ts", prompt);
const refused = await client.publish("ts", { ...prompt, group_size: 3 }).catch((e) => e as Error);

const seen: Record<string, number> = {};
let last: Stamped<"advantage"> | undefined;
const sigmas: number[] = [];
for await (const e of client.watch("ts", ["step", "trajectory", "reward", "advantage"])) {
  seen[e.kind] = (seen[e.kind] ?? 0) + 1;
  if (e.kind === "step") sigmas.push(e.event.sigma); // the kind says which event it is
  if (e.kind === "advantage") last = e;
  if (seen["step"] === 8 && seen["trajectory"] === 2 && seen["reward"] === 2 && last) break;
}

const group = await client.group("ts", "p");
const samples = [];
for (const member of group.members ?? []) {
  const t = await client.trajectory("ts", group.uid, member.sample_index);
  const image = await client.image(t);
  samples.push({
    reward: member.reward, advantage: member.advantage, seed: String(t.sample_seed), log_probs: t.log_probs, digest: t.content_digest,
    image: Buffer.from(image ?? []).toString("base64"),
  });
}
const halves = numbers({ dtype: "BF16", shape: [2], data: Uint8Array.of(0x80, 0x3f, 0x20, 0xc0) });
console.log(JSON.stringify({
  accepted: receipt.accepted, steps: receipt.samples * receipt.num_inference_steps, refused: refused instanceof RefusedError && refused.receipt.code,
  seen, sigmas: sigmas.length, subject: last?.subject, seq: last?.seq, time: last?.time.getTime(), samples, halves: [...halves],
}));
await client.close();
missing; other;
