// A thin client of meander over NATS: it publishes prompts, follows the events of a run, and reads groups, tensors and
// blobs. What it does not have is a line of nats.js away, on `client.nats`.

import { createHash } from "node:crypto";
import { decode as unpack, encode as pack } from "@msgpack/msgpack";
import { connect, createInbox, headers } from "nats";
import type { ConnectionOptions, ConsumerMessages, NatsConnection } from "nats";
import { filters, replyHeader, streams, subjects } from "./contract.js";
import type { Advantage, Events, Prompt, Receipt, Ref, Tensor, Token, Trajectory } from "./contract.js";

export * from "./contract.js";

/** The channels of a run that a stream stores. */
export type Stored = keyof typeof streams;

/** An event with its place in its stream. */
export type Stamped<K extends Stored> = { [P in K]: { kind: P; subject: string; seq: number; time: Date; event: Events[P] } }[K];

/** Decodes the bytes of an event. Integers of more than 32 bits are bigint: seeds and times use all of them. */
export function decode<T>(data: Uint8Array): T {
  return unpack(data, { useBigInt64: true }) as T;
}

/** Encodes an event; bigint becomes an integer of 64 bits. What is undefined is left out, as in JSON. */
export function encode(event: unknown): Uint8Array {
  return pack(event, { useBigInt64: true, ignoreUndefined: true });
}

/** Intake has refused the prompt. */
export class RefusedError extends Error {
  constructor(readonly receipt: Receipt) {
    super(receipt.error ?? "refused");
  }
}

export class Client {
  private constructor(readonly nats: NatsConnection) {}

  /** Connects with the options of nats.js, e.g. { servers: "nats://127.0.0.1:4222" }. */
  static async connect(options: ConnectionOptions): Promise<Client> {
    return new Client(await connect(options));
  }

  close(): Promise<void> {
    return this.nats.drain();
  }

  /** Publishes a prompt and returns intake's receipt, the last one where the prompt waits for a sampler. */
  async publish(run: string, prompt: Prompt): Promise<Receipt> {
    const inbox = createInbox();
    const answers = this.nats.subscribe(inbox);
    try {
      const h = headers();
      h.set(replyHeader, inbox);
      await this.nats.jetstream().publish(subjects.prompt(run), encode(prompt), { headers: h });
      for await (const m of answers) {
        const receipt = decode<Receipt>(m.data);
        if (receipt.accepted) return receipt;
        if (!receipt.waiting) throw new RefusedError(receipt);
      }
      throw new Error(`publish to run ${run}: the connection was closed before an answer came`);
    } finally {
      answers.unsubscribe();
    }
  }

  /** Yields the stored events of a run on some channels, then new ones, until the loop ends. Channels come side by side. */
  async *watch<K extends Stored>(run: string, kinds: readonly K[]): AsyncGenerator<Stamped<K>> {
    const readers: { kind: K; messages: ConsumerMessages }[] = [];
    try {
      for (const kind of kinds) {
        const consumer = await this.nats.jetstream().consumers.get(streams[kind], { filterSubjects: filters[kind](run) });
        readers.push({ kind, messages: await consumer.consume() });
      }
      const next = ({ kind, messages }: (typeof readers)[number]) => {
        const iterator = messages[Symbol.asyncIterator]();
        return async () => ({ kind, result: await iterator.next() });
      };
      const pulls = readers.map(next);
      const pending = pulls.map((pull, i) => pull().then((got) => ({ i, got })));
      while (true) {
        const { i, got } = await Promise.race(pending);
        if (got.result.done) return;
        const m = got.result.value;
        pending[i] = pulls[i]!().then((next) => ({ i, got: next }));
        yield {
          kind: got.kind, subject: m.subject, seq: m.seq, time: new Date(m.info.timestampNanos / 1e6), event: decode(m.data),
        } as Stamped<K>;
      }
    } finally {
      for (const { messages } of readers) messages.stop();
    }
  }

  /** The result of a group; waits until it has closed. */
  async group(run: string, uid: string): Promise<Advantage> {
    const subscription = await this.nats.jetstream().consumers.get(streams.advantage, { filterSubjects: subjects.advantage(run, uid) });
    const messages = await subscription.consume({ max_messages: 1 });
    try {
      for await (const m of messages) return decode<Advantage>(m.data);
    } finally {
      messages.stop();
    }
    throw new Error(`group ${uid} of run ${run}: the connection was closed before it had closed`);
  }

  /** The trajectory of a sample that has ended. */
  async trajectory(run: string, uid: string, sample: number): Promise<Trajectory> {
    const manager = await this.nats.jetstreamManager();
    const m = await manager.streams.getMessage(streams.trajectory, { last_by_subj: subjects.trajectory(run, uid, sample) });
    return decode<Trajectory>(m.data);
  }

  /** The bytes of a blob, compared with their digest. */
  async blob(ref: Ref): Promise<Uint8Array> {
    const store = await this.nats.jetstream().views.os(ref.bucket);
    const data = await store.getBlob(ref.digest);
    if (!data) throw new Error(`blob ${ref.digest} is not in ${ref.bucket}`);
    if (createHash("sha256").update(data).digest("hex") !== ref.digest) throw new Error(`blob ${ref.digest} has other bytes`);
    return data;
  }

  /** The PNG of a sample; undefined where it has none. */
  async image(t: Trajectory): Promise<Uint8Array | undefined> {
    return t.image?.data ?? (t.image?.ref ? this.blob(t.image.ref) : undefined);
  }
}

/** The numbers of a tensor that has its bytes in the event: F32, F16 as stored bits, BF16 widened to float32, I32, I64, U8. */
export function numbers(t: Tensor): Float32Array | Int32Array | BigInt64Array | Uint8Array {
  if (!t.data) throw new Error("the tensor's bytes are in a blob or in parts of the event");
  const bytes = t.data.slice().buffer; // aligned
  switch (t.dtype) {
    case "F32": return new Float32Array(bytes);
    case "BF16": return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer);
    case "I32": return new Int32Array(bytes);
    case "I64": return new BigInt64Array(bytes);
    case "U8": return new Uint8Array(bytes);
    default: throw new Error(`dtype ${t.dtype}: read its bytes yourself`);
  }
}
