// Digests of step events: BLAKE3 where their text begins with blake3:, else SHA-256.

import { createHash } from "node:crypto";
import { blake3 } from "@noble/hashes/blake3.js";

const named = "blake3:";

function sum(data: Uint8Array, name: string): Uint8Array {
  return name === named ? blake3(data) : createHash("sha256").update(data).digest();
}

const algorithm = (digest: string) => (digest.startsWith(named) ? named : "");

const hex = (data: Uint8Array) => Buffer.from(data).toString("hex");

/** Whether bytes have a digest, by the algorithm that it names. */
export function hasDigest(data: Uint8Array, digest: string): boolean {
  return algorithm(digest) + hex(sum(data, algorithm(digest))) === digest;
}

/** Whether a stored event has the payload digest by which a trajectory names it: over its bytes with each byte string's own digest in the place of its content. */
export function hasPayloadDigest(data: Uint8Array, digest: string): boolean {
  const pieces: Uint8Array[] = [];
  let at = 0;
  for (const [start, end] of byteStrings(data)) {
    pieces.push(data.subarray(at, start), sum(data.subarray(start, end), algorithm(digest)));
    at = end;
  }
  return hasDigest(Buffer.concat([...pieces, data.subarray(at)]), digest);
}

/** How many bytes follow the code of a number. */
const numberSizes = new Map([
  [0xca, 4], [0xcb, 8], [0xcc, 1], [0xcd, 2], [0xce, 4], [0xcf, 8], [0xd0, 1], [0xd1, 2], [0xd2, 4], [0xd3, 8],
]);

/** Where the contents of the byte strings of a msgpack value begin and end. */
function* byteStrings(data: Uint8Array): Generator<[number, number]> {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  let at = 0;
  for (let left = 1; left > 0; left--) {
    const code = view.getUint8(at++);
    const sized = (bytes: number) => { // the length that follows, in so many bytes
      const n = bytes === 1 ? view.getUint8(at) : bytes === 2 ? view.getUint16(at) : view.getUint32(at);
      at += bytes;
      return n;
    };
    if (code >= 0xc4 && code <= 0xc6) { // a byte string
      const n = sized(1 << (code - 0xc4));
      yield [at, at + n];
      at += n;
    } else if (code >= 0x80 && code <= 0x8f) left += 2 * (code & 15);
    else if (code >= 0x90 && code <= 0x9f) left += code & 15;
    else if (code >= 0xa0 && code <= 0xbf) at += code & 31;
    else if (code >= 0xd9 && code <= 0xdb) at += sized(1 << (code - 0xd9));
    else if (code === 0xdc || code === 0xdd) left += sized(2 << (code - 0xdc));
    else if (code === 0xde || code === 0xdf) left += 2 * sized(2 << (code - 0xde));
    else if (code === 0xc1 || code >= 0xc7 && code <= 0xc9 || code >= 0xd4 && code <= 0xd8) {
      throw new Error(`msgpack code ${code.toString(16)}; events have none`);
    } else at += numberSizes.get(code) ?? 0;
  }
}
