// What a run was asked for and made with, and how it is made again.
import { h, only, words, plural } from "./dom.js";

// copy is a button that puts a text on the clipboard, and says so. A page without TLS has no clipboard: then the text
// is selected.
export function copy(from, name) {
  const says = h("span", { class: "small muted", role: "status" });
  const button = h(
    "button",
    {
      "aria-label": `Copy the ${name}`,
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(from.textContent);
          says.textContent = "copied";
        } catch {
          getSelection().selectAllChildren(from);
          says.textContent = "selected: copy it with the keys of your system";
        }
      },
    },
    "Copy",
  );
  return h("span", { class: "tools" }, button, says);
}

// The settings that are shown before the others.
const first = [
  "model", "network", "policy_version", "num_inference_steps", "height", "width", "frames", "noise_level", "transitions",
  "true_cfg_scale", "guidance", "group_size", "seed", "reward", "advantage.estimator",
];

const value = (s) => [
  s.name === "weights_digest" || s.name === "base_digest"
    ? h("span", { class: "mono", title: s.value }, s.value.slice(0, 16))
    : s.value,
  s.given && h("span", { class: "small muted" }, " given"),
  s.varies && h("span", { class: "small muted" }, " differs"),
];

const rows = (list) => list.map((s) => h("div", {}, h("dt", {}, s.name), h("dd", {}, value(s))));

// code is a text to copy.
const code = (title, text) => {
  const body = h("pre", { class: "json", tabindex: 0, "aria-label": title }, text);
  return h("div", {}, h("div", { class: "cardhead" }, h("h3", {}, title), copy(body, title.toLowerCase())), body);
};

export function settingsCard(x) {
  if (!x) return null;
  const main = first.map((name) => x.settings.find((s) => s.name === name)).filter(Boolean),
    rest = x.settings.filter((s) => !main.includes(s));
  const again = x.again;
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "cardhead" },
      h("h2", {}, "Settings"),
      !x.whole &&
        h("span", { class: "small muted" }, `of the first ${plural(Math.max(x.groups, x.prompts), "group")}`),
    ),
    h("dl", { class: "facts wide" }, rows(main)),
    rest.length > 0 &&
      h(
        "details",
        {},
        h("summary", {}, `All ${x.settings.length} settings`),
        [...new Set(rest.map((s) => s.part))].map((part) => [
          h("h3", {}, part),
          h("dl", { class: "facts wide" }, rows(rest.filter((s) => s.part === part))),
        ]),
      ),
    again &&
      h(
        "details",
        {},
        h("summary", {}, "Make it again"),
        again.command && code("Command", again.command),
        again.python && code("Python", again.python),
        again.notes.map((n) => h("p", { class: "small muted" }, words(n))),
      ),
  );
}

// differences is the card of the settings in which two runs differ.
export const differences = (a, b, list) =>
  h(
    "div",
    { class: "card flush" },
    h("div", { class: "cardhead" }, h("h2", {}, "Settings that differ")),
    list.length === 0
      ? h("p", { class: "muted pad" }, "None of those that are stored.")
      : h(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "settings that differ" },
          h(
            "table",
            {},
            h("thead", {}, h("tr", {}, ["Setting", a, b].map((t) => h("th", {}, t)))),
            h(
              "tbody",
              {},
              list.map((s) =>
                h("tr", {}, h("td", {}, s.name), [s.a, s.b].map((v) => h("td", { class: "setting" }, v || "–"))),
              ),
            ),
          ),
        ),
  );
