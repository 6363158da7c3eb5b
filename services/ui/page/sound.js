// The sound of a sample: a player under its waveform.

import { h } from "./dom.js";
import { stored } from "./server.js";

// player makes the player of a WAV file of 32-bit floats. In a small one a button is all there is room for.
export function player(src, what, small) {
  const wave = h("canvas", { class: "wave", width: 640, height: 80, role: "img", "aria-label": `waveform of ${what}` }),
    audio = h("audio", { src, controls: !small, preload: "none", "aria-label": what });
  const button = h("button", { "aria-label": `play ${what}`, onclick: () => (audio.paused ? audio.play() : audio.pause()) });
  const say = () => (button.textContent = audio.paused ? "Play" : "Pause");
  for (const event of ["play", "pause", "ended"]) audio.addEventListener(event, say);
  say();
  read(src)
    .then((s) => requestAnimationFrame(() => draw(wave, s))) // once it is in the document, where it has its colour
    .catch(() => wave.remove());
  return h("div", { class: "sound" }, wave, small && button, audio);
}

// read returns the values of a file, of all channels of a sample together, and how many channels it has.
async function read(src) {
  const file = stored
    ? Uint8Array.from(atob(src.slice(src.indexOf(",") + 1)), (c) => c.charCodeAt(0)).buffer
    : await (await fetch(src)).arrayBuffer();
  const view = new DataView(file);
  let channels = 1;
  for (let at = 12; at + 8 <= file.byteLength; ) {
    const name = String.fromCharCode(...new Uint8Array(file, at, 4)),
      size = view.getUint32(at + 4, true);
    if (name === "fmt ") channels = view.getUint16(at + 10, true);
    if (name === "data") return { channels, values: new Float32Array(file.slice(at + 8, at + 8 + size)) };
    at += 8 + size + (size % 2);
  }
  throw new Error("no values");
}

// draw draws the least and the greatest value of each moment, one channel under the other.
function draw(canvas, { channels, values }) {
  const c = canvas.getContext("2d"),
    n = values.length / channels,
    high = canvas.height / channels;
  c.fillStyle = getComputedStyle(canvas).color;
  for (let k = 0; k < channels; k++)
    for (let x = 0; x < canvas.width; x++) {
      let low = 1,
        top = -1;
      const end = Math.max(Math.floor(((x + 1) * n) / canvas.width), Math.floor((x * n) / canvas.width) + 1);
      for (let i = Math.floor((x * n) / canvas.width); i < Math.min(end, n); i++) {
        const v = Math.max(-1, Math.min(1, values[i * channels + k]));
        low = Math.min(low, v);
        top = Math.max(top, v);
      }
      const y = high * (k + 0.5) - (top * high) / 2;
      c.fillRect(x, y, 1, Math.max(1, ((top - low) * high) / 2));
    }
}
