// Publishes a prompt, follows its run, and prints what came of it, for TestTypeScript to compare with what is stored.
import { createHash } from "node:crypto";
import { Client, numbers, RefusedError, track } from "./client.js";
import type { Prompt, Stamped, Step, Trajectory } from "./client.js";

const client = await Client.connect({ servers: process.argv[2]! });
const prompt: Prompt = {
  prompt: "a red fox", uid: "p", group_size: 2, num_inference_steps: 4, height: 64, width: 64, seed: 2 ** 40,
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
const latents: number[][] = []; // how many numbers the states of a step have, and how many its shape says
for await (const e of client.watch("ts", ["step", "trajectory", "reward", "advantage"])) {
  seen[e.kind] = (seen[e.kind] ?? 0) + 1;
  if (e.kind === "step") { // the kind says which event it is
    sigmas.push(e.event.sigma);
    for (const { tensor } of e.event.latents ?? []) {
      latents.push([numbers(tensor).length, (tensor.shape ?? []).reduce((a, b) => a * b, 1)]);
    }
  }
  if (e.kind === "advantage") last = e;
  if (seen["step"] === 8 && seen["trajectory"] === 2 && seen["reward"] === 2 && last) break;
}

const group = await client.group("ts", "p");
const samples = [];
for (const member of group.members ?? []) {
  const t = await client.trajectory("ts", group.uid, member.sample_index);
  const image = await client.medium(t, "image");
  const states = await client.step(t, 1).then((e) => ("latents" in e ? e.latents : null) ?? []);
  const other = structuredClone(t);
  other.steps![1]!.digest = t.steps![0]!.digest;
  const later = { ...t, cfg_phase: 0.2 };
  samples.push({
    later: await client.step(later, 1).then(() => "", (e: Error) => e.message),
    states: states.map(({ index, tensor }) => ({ index, data: Buffer.from(tensor.data!).toString("base64") })),
    other: await client.step(other, 1).then(() => "", (e: Error) => e.message),
    reward: member.reward, advantage: member.advantage, seed: String(t.sample_seed), log_probs: t.log_probs, digest: t.content_digest,
    image: Buffer.from(image ?? []).toString("base64"),
  });
}

// A wait ends with its signal, or with the connection, and says so.
const why = (wait: Promise<unknown>) => wait.then(() => "it ended", (e: Error) => e.message);
const next = (waiting = {}) => client.watch("none", ["advantage"], waiting).next();
const signal = AbortSignal.abort(new Error("enough"));
const late = new AbortController();
const waits = [client.publish("ts", prompt, { signal }), client.group("none", "p", { signal }), next({ signal }), next(late)];
setTimeout(() => late.abort(new Error("enough")));
const ended = await Promise.all(waits.map(why));

// A step whose tensor travelled in parts beside it, which the test has stored.
const large = { run: "large", uid: "p", sample_index: 0, stage: "main", attempt: "a", steps: [{ seq: 1, digest: process.argv[3]! }] } as Trajectory;
const [state] = ((await client.step(large, 0)) as Step).latents ?? [];
const parts = createHash("sha256").update(state!.tensor.data!).digest("hex");

const tracks = [{ name: "video", elements: 1 }, { name: "sound", elements: 2 }];
const halves = track(numbers({ dtype: "BF16", shape: [3], data: Uint8Array.of(0, 0, 0x80, 0x3f, 0x20, 0xc0) }), tracks, "sound");
const bits = [...numbers({ dtype: "F16", shape: [1], data: Uint8Array.of(0x00, 0x3c) })];
const open = client.watch("ts", ["advantage"]);
await open.next();
const left = why(open.next());
await client.close();
ended.push(await left);
console.log(JSON.stringify({
  accepted: receipt.accepted, steps: receipt.samples * receipt.num_inference_steps, refused: refused instanceof RefusedError && refused.receipt.code,
  seen, sigmas: sigmas.length, latents, subject: last?.subject, seq: last?.seq, time: last?.time.getTime(), samples, halves: [...halves], bits, ended, parts,
}));
missing; other;
