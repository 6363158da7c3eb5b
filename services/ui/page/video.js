// A video of a sample: played in a loop, or scrubbed frame by frame, and its files.

import { h } from "./dom.js";
import { may } from "./server.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");

// video plays an animated PNG under a button and a slider of its frames.
export function video(src, label, width, height) {
  const canvas = h("canvas", { width, height, role: "img", "aria-label": label, class: Math.max(width, height) < 256 ? "smallpic" : "" }),
    play = h("button", { disabled: true, onclick: () => set(!playing) }, "Play"),
    slider = h("input", {
      type: "range",
      min: 0,
      max: 0,
      disabled: true,
      "aria-label": "frame",
      oninput: () => {
        set(false);
        show(Number(slider.value));
      },
    }),
    says = h("span", { class: "small muted num" }, "loading"),
    box = h("div", { class: "video" }, canvas, h("div", { class: "tools" }, play, slider, says));
  let frames = [],
    at = 0,
    playing = false,
    timer = 0,
    asked = 0;
  // show draws a frame, unless another one was asked for meanwhile.
  const show = async (i) => {
    const mine = ++asked;
    at = i % frames.length;
    slider.value = at;
    slider.setAttribute("aria-valuetext", (says.textContent = `frame ${at + 1} of ${frames.length}`));
    const image = await createImageBitmap(frames[at].png);
    if (mine === asked) canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    image.close();
  };
  const next = () => {
    timer = setTimeout(async () => {
      await show(at + 1);
      if (playing && box.isConnected) next();
    }, frames[at].milliseconds);
  };
  const set = (on) => {
    clearTimeout(timer);
    playing = on;
    play.textContent = on ? "Pause" : "Play";
    if (on) next();
  };
  (async () => {
    try {
      const answer = await fetch(src);
      if (!answer.ok) throw new Error((await answer.json()).error);
      frames = split(await answer.arrayBuffer());
      slider.max = frames.length - 1;
      play.disabled = slider.disabled = frames.length < 2;
      await show(0);
      set(frames.length > 1 && !still.matches);
    } catch (err) {
      box.replaceChildren(h("img", { src, alt: label }), h("p", { class: "small" }, `Its frames cannot be read: ${err.message}`));
    }
  })();
  return box;
}

// split makes each frame of an animated PNG a PNG of its own: of a sample, every frame replaces the one before.
function split(file) {
  const data = new DataView(file),
    frames = [],
    bytes = (from, to) => new Uint8Array(file, from, to - from),
    signature = bytes(0, 8),
    end = chunk("IEND", new Uint8Array(0));
  let header = null,
    parts = [],
    delay = 0;
  const finish = () => {
    if (parts.length > 0) frames.push({ png: new Blob([signature, header, ...parts, end], { type: "image/png" }), milliseconds: delay });
    parts = [];
  };
  for (let from = 8; from + 12 <= file.byteLength; ) {
    const size = data.getUint32(from),
      kind = String.fromCharCode(...bytes(from + 4, from + 8)),
      to = from + 12 + size;
    if (kind === "IHDR") header = bytes(from, to);
    if (kind === "IDAT") parts.push(bytes(from, to));
    if (kind === "fdAT") parts.push(chunk("IDAT", bytes(from + 12, to - 4)));
    if (kind === "fcTL") {
      finish();
      delay = (1000 * data.getUint16(from + 28)) / (data.getUint16(from + 30) || 100);
    }
    from = to;
  }
  finish();
  if (frames.length === 0) throw new Error("it has none");
  return frames;
}

// chunk makes a chunk of a PNG, with its length and checksum.
function chunk(kind, data) {
  const out = new Uint8Array(12 + data.length),
    view = new DataView(out.buffer);
  view.setUint32(0, data.length);
  for (let i = 0; i < 4; i++) out[4 + i] = kind.charCodeAt(i);
  out.set(data, 8);
  view.setUint32(8 + data.length, crc(out.subarray(4, 8 + data.length)));
  return out;
}

const table = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

function crc(data) {
  let c = 0xffffffff;
  for (const b of data) c = table[(c ^ b) & 255] ^ (c >>> 8);
  return (c ^ 0xffffffff) >>> 0;
}

// downloads are the files of a video; where no mp4 is made they say why.
export const downloads = (src, mp4, name) =>
  h(
    "div",
    { class: "tools downloads" },
    h("a", { class: "button", href: src, download: name + ".apng" }, "Download APNG"),
    may.mp4
      ? [h("button", { disabled: true }, "Download mp4"), h("span", { class: "small muted" }, may.mp4)]
      : h("a", { class: "button", href: mp4, download: name + ".mp4" }, "Download mp4"),
  );
