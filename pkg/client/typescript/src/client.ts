// A thin client of meander over NATS: it publishes prompts, follows the events of a run, and reads groups, tensors and
// blobs. What it does not have is a line of nats.js away, on `client.nats`.

import { decode as unpack, encode as pack } from "@msgpack/msgpack";
import { connect, createInbox, headers } from "nats";
import type { ConnectionOptions, ConsumerMessages, NatsConnection } from "nats";
import { filters, replyHeader, streams, structs, subjects } from "./contract.js";
import type { Advantage, Events, Medium, Prompt, Receipt, Ref, Step, Tensor, Token, Tokens, Track, Trajectory } from "./contract.js";
import { hasDigest, hasPayloadDigest } from "./digest.js";

export * from "./contract.js";

/** The channels of a run that a stream stores. */
export type Stored = keyof typeof streams;

/** An event with its place in its stream. */
export type Stamped<K extends Stored> = { [P in K]: { kind: P; subject: string; seq: number; time: Date; event: Events[P] } }[K];

/** Makes integers of JSON that a number would round bigint, and throws where the runtime does not tell their digits. */
function exact(key: string, v: unknown, at?: { source: string }): unknown {
  if (typeof v !== "number" || Number.isSafeInteger(v) || v % 1) return v;
  if (!at) throw new Error(`${key}: ${v}; JSON has integers beyond 2^53, which this runtime rounds (Node 21 does not)`);
  return /^-?\d+$/.test(at.source) ? BigInt(at.source) : v;
}

/** Decodes the bytes of an event, msgpack or JSON, whose byte strings stay base64. Integers of more than 32 bits are bigint: seeds and times use all of them. */
export function decode<T>(data: Uint8Array): T {
  if (/^[{\s]/.test(String.fromCharCode(data[0]))) return JSON.parse(new TextDecoder().decode(data), exact as never) as T;
  return unpack(data, { useBigInt64: true }) as T;
}

/** Encodes an event; bigint becomes an integer of 64 bits. What is undefined is left out, as in JSON. */
export function encode(event: unknown): Uint8Array {
  return pack(wide(event), { useBigInt64: true, ignoreUndefined: true });
}

/** Makes integers of more than 32 bits bigint, anywhere in a value: pack would write them as floats. */
function wide(v: unknown): unknown {
  if (typeof v === "number") return Number.isSafeInteger(v) && (v > 0xffffffff || v < -0x80000000) ? BigInt(v) : v;
  if (Array.isArray(v)) return v.map(wide);
  if (!v || typeof v !== "object" || ArrayBuffer.isView(v)) return v;
  return Object.fromEntries(Object.entries(v).map(([k, x]) => [k, wide(x)]));
}

/** Throws where an event has a field that this version does not know: what is computed without it may be of another sample. What decides no rollout is left out: the rules of the group, and times. */
export function checkKnown(event: Trajectory | Step | Tokens, struct: "Trajectory" | "Step" | "Tokens"): void {
  const found = unknown(event, struct, "");
  if (found) throw new Error(`sample ${event.uid} #${event.sample_index}: setting ${found} is not known to this version; upgrade the client`);
}

/** The first field that a struct does not have, with its value. */
function unknown(value: unknown, form: string, path: string): string | undefined {
  const fields = structs[form.replace(/[[\]?]/g, "")];
  if (!fields || !value || typeof value !== "object") return undefined;
  if (Array.isArray(value)) return value.map((v) => unknown(v, form, path)).find(Boolean);
  for (const [key, v] of Object.entries(value)) {
    const of = fields[key];
    if (!of) return `${path}${key}=${String(v).slice(0, 40)}`;
    const found = key === "group" || key === "timings" ? undefined : unknown(v, of, `${path}${key}.`);
    if (found) return found;
  }
  return undefined;
}

/** Intake has refused the prompt. */
export class RefusedError extends Error {
  constructor(readonly receipt: Receipt) {
    super(receipt.error ?? "refused");
  }
}

/** A signal ends a wait before its time: the wait throws the signal's reason. */
export interface Waiting {
  signal?: AbortSignal;
}

export class Client {
  private readonly closed = new AbortController();

  private constructor(readonly nats: NatsConnection, private readonly inboxPrefix?: string) {
    void nats.closed().then((err) => this.closed.abort(err ?? new Error("the connection was closed")));
  }

  /** Connects with the options of nats.js, e.g. { servers: "nats://127.0.0.1:4222" }. Roles need inboxPrefix. */
  static async connect(options: ConnectionOptions): Promise<Client> {
    return new Client(await connect(options), options.inboxPrefix);
  }

  close(): Promise<void> {
    return this.nats.drain();
  }

  /** Calls stop when a wait must end; check throws why. */
  private ending({ signal }: Waiting, stop: () => void) {
    const end = AbortSignal.any([this.closed.signal, ...(signal ? [signal] : [])]);
    end.addEventListener("abort", stop);
    if (end.aborted) stop();
    return { check: () => end.throwIfAborted(), release: () => end.removeEventListener("abort", stop) };
  }

  /** Publishes a prompt and returns intake's receipt, the last one where the prompt waits for a sampler. */
  async publish(run: string, prompt: Prompt, waiting: Waiting = {}): Promise<Receipt> {
    const inbox = createInbox(this.inboxPrefix);
    const answers = this.nats.subscribe(inbox);
    const end = this.ending(waiting, () => answers.unsubscribe());
    try {
      end.check();
      const h = headers();
      h.set(replyHeader, inbox);
      await this.nats.jetstream().publish(subjects.prompt(run), encode(prompt), { headers: h });
      for await (const m of answers) {
        const receipt = decode<Receipt>(m.data);
        if (receipt.accepted) return receipt;
        if (!receipt.waiting) throw new RefusedError(receipt);
      }
      end.check();
      throw new Error(`publish to run ${run}: the connection was closed before an answer came`);
    } finally {
      end.release();
      answers.unsubscribe();
    }
  }

  /** Yields the stored events of a run on some channels, then new ones, until the loop ends. Channels come side by side. */
  async *watch<K extends Stored>(run: string, kinds: readonly K[], waiting: Waiting = {}): AsyncGenerator<Stamped<K>> {
    const readers: { kind: K; messages: ConsumerMessages }[] = [];
    const stop = () => readers.forEach(({ messages }) => messages.stop());
    const end = this.ending(waiting, stop);
    try {
      for (const kind of kinds) {
        end.check();
        const consumer = await this.nats.jetstream().consumers.get(streams[kind], { filterSubjects: filters[kind](run) });
        readers.push({ kind, messages: await consumer.consume() });
      }
      const pulls = readers.map(({ kind, messages }, i) => {
        const iterator = messages[Symbol.asyncIterator]();
        return () => {
          const pulled = iterator.next().then((result) => ({ i, kind, result }));
          pulled.catch(() => {}); // thrown where it is awaited
          return pulled;
        };
      });
      const pending = pulls.map((pull) => pull());
      while (true) {
        end.check();
        const { i, kind, result } = await Promise.race(pending);
        end.check();
        if (result.done) throw new Error(`watch of run ${run}: the connection was closed`);
        const m = result.value;
        pending[i] = pulls[i]!();
        yield {
          kind, subject: m.subject, seq: m.seq, time: new Date(m.info.timestampNanos / 1e6), event: decode(m.data),
        } as Stamped<K>;
      }
    } finally {
      end.release();
      stop();
    }
  }

  /** The result of a group; waits until it has closed. */
  async group(run: string, uid: string, waiting: Waiting = {}): Promise<Advantage> {
    const consumer = await this.nats.jetstream().consumers.get(streams.advantage, { filterSubjects: subjects.advantage(run, uid) });
    const messages = await consumer.consume({ max_messages: 1 });
    const end = this.ending(waiting, () => messages.stop());
    try {
      for await (const m of messages) return decode<Advantage>(m.data);
      end.check();
    } finally {
      end.release();
      messages.stop();
    }
    throw new Error(`group ${uid} of run ${run}: the connection was closed before it had closed`);
  }

  /** The trajectory of a sample that has ended. */
  async trajectory(run: string, uid: string, sample: number, stage = "main"): Promise<Trajectory> {
    return decode<Trajectory>(await this.last(streams.trajectory, subjects.trajectory(run, uid, sample, stage)));
  }

  /** The bytes of the last message on a subject. */
  private async last(stream: string, subject: string): Promise<Uint8Array> {
    const manager = await this.nats.jetstreamManager();
    return (await manager.streams.getMessage(stream, { last_by_subj: subject })).data;
  }

  /** Step event i of an image's trajectory, from 0, or event i of tokens of a text's, compared with the digest that names it. Tensors that travelled beside it are put in. */
  async step(t: Trajectory, i: number): Promise<Step | Tokens> {
    checkKnown(t, "Trajectory");
    const ref = t.steps?.[i];
    if (!ref) throw new RangeError(`step ${i}: the trajectory has ${t.steps?.length ?? 0}`);
    const of = [t.run, t.uid, t.sample_index, t.stage, ref.attempt ?? t.attempt] as const;
    const subject = t.text ? subjects.tokens(...of, i) : subjects.step(...of, Number(t.start?.step_index ?? 0) + i);
    const data = await this.last(streams.step, subject);
    if (!hasPayloadDigest(data, ref.digest)) throw new Error(`${subject} is not the event that the trajectory names`);
    const event = decode<Step & Tokens>(data);
    checkKnown(event, t.text ? "Tokens" : "Step");
    for (const x of [...(event.latents ?? []), ...(event.debug ?? [])].map(({ tensor }) => tensor)) await this.load(x, subject);
    for (const x of [event.checkpoint, event.logits?.ids, event.logits?.values]) if (x) await this.load(x, subject);
    return event;
  }

  /** Puts the bytes of a tensor of the event on subject in, where they are in a blob or in messages beside it. */
  private async load(x: Tensor, subject: string): Promise<void> {
    const { ref, parts } = x;
    if (ref) x.data = await this.blob(ref);
    if (!parts) return;
    const pieces = [];
    for (let k = parts.first; k < parts.first + parts.count; k++) pieces.push(await this.last(streams.step, `${subject}.${k}`));
    const data = Buffer.concat(pieces);
    if (data.length !== parts.size || !hasDigest(data, parts.digest)) throw new Error(`the parts of ${subject} have other bytes`);
    x.data = data;
  }

  /** The bytes of a blob, compared with their digest. */
  async blob(ref: Ref): Promise<Uint8Array> {
    const store = await this.nats.jetstream().views.os(ref.bucket);
    const data = await store.getBlob(ref.digest);
    if (!data) throw new Error(`blob ${ref.digest} is not in ${ref.bucket}`);
    if (!hasDigest(data, ref.digest)) throw new Error(`blob ${ref.digest} has other bytes`);
    return data;
  }

  /** A file of a sample, by its kind: its image, a PNG; its video, an animated PNG; its audio, a WAV of 32-bit floats; undefined where it has none. */
  async medium(t: Trajectory, kind: Medium["kind"]): Promise<Uint8Array | undefined> {
    const file = t.media?.find((m) => m.kind === kind);
    return file?.data ?? (file?.ref ? this.blob(file.ref) : undefined);
  }
}

/** One track of a state, such as its sound: a view of the state's numbers. tracks are those of a step or of a trajectory. */
export function track<T extends ReturnType<typeof numbers>>(state: T, tracks: Pick<Track, "name" | "elements">[] | null | undefined, name: string): T {
  let at = 0;
  for (const t of tracks ?? []) {
    if (t.name === name) return state.subarray(at, at + t.elements) as T;
    at += t.elements;
  }
  throw new Error(`track ${name}: the state has ${(tracks ?? []).map((t) => t.name).join(", ") || "one part"}`);
}

/** The numbers of a tensor that has its bytes in the event: F32, F16 as stored bits, BF16 widened to float32, I32, I64, U8. */
export function numbers(t: Tensor): Float32Array | Uint16Array | Int32Array | BigInt64Array | Uint8Array {
  if (!t.data) throw new Error("the tensor's bytes are in a blob or in parts of the event");
  const bytes = Uint8Array.from(t.data).buffer; // aligned; slice of a Buffer would be a view
  switch (t.dtype) {
    case "F32": return new Float32Array(bytes);
    case "F16": return new Uint16Array(bytes);
    case "BF16": return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer);
    case "I32": return new Int32Array(bytes);
    case "I64": return new BigInt64Array(bytes);
    case "U8": return new Uint8Array(bytes);
    default: throw new Error(`dtype ${t.dtype}: read its bytes yourself`);
  }
}
