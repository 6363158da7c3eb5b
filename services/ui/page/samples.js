// A group with its samples, and one sample.
import { h, link, fixed, signed, plural, seconds, ago, when, badge, crumbs, empty, factList, only, todo, whole, words } from "./dom.js";
import { advantage, card, conditions, faults, givenFiles, scores, stageRows } from "./cards.js";
import { ask, api, listen, media, stored } from "./server.js";
import { player } from "./sound.js";
import { downloads, video } from "./video.js";
import { chart } from "./chart.js";

const pageSize = 64;

export async function groupView(run, uid, query) {
  let offset = Number(query.get("offset")) || 0;
  const load = () => ask(api("runs", run, "groups", uid), { offset, limit: pageSize });
  let g = await load();
  const status = h("span", { class: "tools" }),
    facts = h("div", { class: "card" }),
    list = h("div"),
    branches = h("div"),
    title = h("h1"),
    pager = h("div", { class: "tools" }),
    prompt = h("div", { class: "card" });
  const draw = () => {
    only(status, badge(g.status));
    title.textContent = g.prompt ? (g.prompt.length > 160 ? g.prompt.slice(0, 160) + "…" : g.prompt) : uid;
    only(
      prompt,
      g.prompt.length > 160 && h("p", { class: "promptbox" }, g.prompt),
      g.negative_prompt && h("p", { class: "small muted" }, `Negative: ${g.negative_prompt}`),
      g.ground_truth && h("p", { class: "small muted" }, `Ground truth: ${g.ground_truth}`),
      g.error && h("p", {}, badge(g.status), " ", words(g.error)),
      todo(g.fix),
    );
    prompt.hidden = prompt.children.length === 0;
    const rows = [
      ["Mean reward", g.mean === null ? null : fixed(g.mean, 4)],
      ["Std", g.std === null ? null : `${fixed(g.std, 4)} (${g.std_label})`],
      ["Estimator", g.estimator],
      ["Rewards", g.rewards.map((r) => (g.rewards.length > 1 ? `${r.weight} × ${r.name}` : r.name)).join(", ")],
      ["Lane", g.lane],
      ["Tenant", g.tenant],
      ["Batch", g.batch === g.uid ? null : g.batch],
      ["Opened", g.opened ? [when(g.opened), " ", h("span", { class: "when muted" }, ago(g.opened))] : null],
      ["Open for", g.closed ? seconds(Math.max(0, g.closed - g.opened) / 1000) : null],
      ["Deadline", g.deadline && !g.closed ? when(g.deadline) : null],
    ].filter(([, v]) => v);
    if (g.refilled_by) rows.push(["Replaced by", h("a", { href: link("runs", run, g.refilled_by) }, g.refilled_by)]);
    only(
      facts,
      h(
        "dl",
        { class: "facts wide" },
        rows.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))),
      ),
    );
    const forest = tree(run, g);
    only(branches, forest);
    branches.hidden = !forest;
    const texts = g.samples.some((s) => s.answer !== undefined);
    only(
      list,
      g.samples.length === 0
        ? h(
            "div",
            { class: "card" },
            empty(
              "No sample",
              h(
                "p",
                {},
                g.status === "refused"
                  ? "The prompt was refused, so nothing was made."
                  : "Nothing is stored of this group's samples.",
              ),
            ),
          )
        : g.stages
          ? stageRows(run, g)
          : h(
            "div",
            { class: "samples" + (texts ? " texts" : "") },
            givenFiles(run, uid, g.samples.find((s) => s.conditions)),
            g.samples.map((s) => card(run, g, s)),
          ),
    );
    only(
      pager,
      h("span", { class: "small muted" }, `${plural(g.total, "sample")}, best reward first`),
      g.total > pageSize && [
        h("button", { disabled: offset === 0, onclick: () => move(-pageSize) }, "Previous"),
        h("span", { class: "small num" }, `${offset + 1} to ${offset + g.samples.length}`),
        h("button", { disabled: offset + g.samples.length >= g.total, onclick: () => move(pageSize) }, "Next"),
      ],
    );
  };
  const move = async (by) => {
    offset = Math.max(0, offset + by);
    history.replaceState(history.state, "", link("runs", run, uid) + (offset ? `?offset=${offset}` : ""));
    g = await load();
    draw();
  };
  draw();
  let timer = 0;
  const refresh = () => {
    timer =
      timer ||
      setTimeout(async () => {
        timer = 0;
        try {
          g = await load();
          draw();
        } catch {
          /* the stream says it */
        }
      }, 700);
  };
  return {
    title: g.prompt.slice(0, 60) || uid,
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          crumbs(h("a", { href: "#/runs" }, "Runs"), h("a", { href: link("runs", run) }, run)),
          title,
          h("p", { class: "small muted mono" }, uid),
        ),
        status,
      ),
      prompt,
      facts,
      branches,
      h("div", { class: "head" }, h("div", {}, h("h2", {}, "Samples")), pager),
      list,
    ],
    start: () => {
      const stop = listen(
        { run },
        {
          groups: ({ rows }) => {
            if (rows.some((r) => r.uid === uid)) refresh();
          },
          reset: refresh,
        },
      );
      refresh(); // what came between the answer and the stream
      return () => {
        clearTimeout(timer);
        stop();
      };
    },
  };
}

// tree draws the samples of a tree: a line for each, from the step where it leaves its parent to the end.
function tree(run, g) {
  const drawn = g.samples.filter((s) => s.steps > 0).sort((a, b) => a.sample_index - b.sample_index);
  if (!drawn.some((s) => s.parent !== undefined)) return null;
  const rows = new Map(drawn.map((s, i) => [s.sample_index, i])),
    steps = Math.max(...drawn.map((s) => s.steps));
  const best = Math.max(...drawn.map((s) => s.reward ?? -Infinity)),
    x = (k) => 24 + (k * 640) / steps,
    y = (i) => 18 + i * 30;
  const svg = h("svg", {
    viewBox: `0 0 800 ${y(drawn.length)}`,
    class: "tree",
    role: "img",
    "aria-label": `a tree of ${drawn.length} samples over ${steps} steps`,
  });
  for (const s of drawn) {
    const at = rows.get(s.sample_index),
      begin = s.parent === undefined ? 0 : s.parent_step,
      from = rows.get(s.parent);
    if (from !== undefined)
      svg.append(
        h("line", { x1: x(begin), x2: x(begin), y1: y(from), y2: y(at) }),
        h("circle", { cx: x(begin), cy: y(from), r: 4 }),
      );
    svg.append(
      h("line", { x1: x(begin), x2: x(steps), y1: y(at), y2: y(at), class: s.reward === best ? "best" : "" }),
      h(
        "text",
        { x: x(steps) + 10, y: y(at) + 4 },
        `#${s.sample_index}  ${s.reward === null ? s.status : fixed(s.reward)}  ${s.advantage === null ? "" : signed(s.advantage)}`,
      ),
    );
  }
  return h(
    "div",
    { class: "card" },
    h("h2", {}, "Tree"),
    h(
      "p",
      { class: "small muted" },
      `Each line is a sample with its reward and advantage, from the step where it leaves its parent to step ${steps}. The best have the colour of the page.`,
    ),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "tree" }, svg),
  );
}

// curves draws what changes over the steps of an image.
function curves(x) {
  const r = x.rollout;
  if (!r || !r.sigmas || r.sigmas.length === 0) return waterfall(x.timings);
  const n = x.transitions.length,
    at = [...Array(n).keys()];
  const logProbs = at.map((i) => (x.log_probs && x.log_probs[i] !== undefined ? x.log_probs[i] : null));
  const drawn = logProbs.some((v) => v !== null);
  return h(
    "div",
    { class: "grid" },
    waterfall(x.timings),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Sigma and noise by step"),
      chart({
        title: `sigma from ${fixed(r.sigmas[0])} to ${fixed(r.sigmas[n])} in ${n} steps`,
        x: { label: "step", values: [...at, n] },
        series: [
          { label: "sigma", values: r.sigmas },
          { label: "noise std", values: [...r.noise_std, null], tone: "--warn", dashed: true },
        ],
      }),
    ),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Log-prob by step"),
      drawn
        ? chart({
            title: `log-probs of ${n} steps, in nats (${r.log_prob_kind})`,
            x: { label: "step", values: at },
            series: [{ label: `log-prob (${r.log_prob_kind})`, values: logProbs, points: true }],
          })
        : h("p", { class: "muted" }, "No step has a log-prob: all are ODE steps, without noise."),
    ),
  );
}

// steps is the table behind the curves.
function steps(x) {
  const r = x.rollout;
  if (!r || x.transitions.length === 0) return null;
  return h(
    "details",
    { class: "card" },
    h("summary", {}, h("b", {}, "Steps as a table")),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "steps" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Step", "Sigma", "Runs", "Noise std", "Log-prob", "State"].map((t, i) =>
              h("th", { class: i === 2 || i === 5 ? "" : "n" }, t),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          x.transitions.map((t, i) =>
            h(
              "tr",
              {},
              h("td", { class: "n" }, i),
              h("td", { class: "n" }, fixed(r.sigmas[i], 4)),
              h("td", {}, t),
              h("td", { class: "n" }, fixed(r.noise_std[i], 4)),
              h("td", { class: "n" }, x.log_probs && x.log_probs[i] !== undefined ? fixed(x.log_probs[i], 6) : "–"),
              h("td", {}, (x.latent_step_indices || []).includes(i) ? "stored" : ""),
            ),
          ),
        ),
      ),
    ),
  );
}

// tone says how likely a token was.
const tone = (p) => (p > -0.105 ? 0 : p > -0.693 ? 1 : p > -2.303 ? 2 : p > -4.605 ? 3 : 4);
const visible = (t) => t.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

function tokens(x) {
  if (!x.tokens || x.tokens.length === 0) return null;
  const says = h("p", { class: "small", role: "status" }),
    tops = x.tokens.some((t) => t.top),
    top = h("ol", { class: "likely", "aria-label": "likeliest tokens here" });
  const drawTop = (t) =>
    only(
      top,
      (t.top || []).map((c) =>
        h(
          "li",
          { class: c.id === t.id ? "drawn" : "" },
          h("code", {}, c.text ? visible(c.text).trimEnd() || "␠" : `⟨${c.id}⟩`),
          h("progress", { class: "meter", max: 1, value: Math.exp(c.log_prob), "aria-hidden": "true" }),
          h("span", { class: "num small" }, fixed(Math.exp(c.log_prob), 4)),
        ),
      ),
    );
  const tell = (t, i) => {
    drawTop(t);
    says.textContent =
      `token ${i}: id ${t.id}` +
      (t.generated
        ? `, log-prob ${fixed(t.log_prob, 4)} (p = ${fixed(Math.exp(t.log_prob), 4)})` +
          (t.entropy !== undefined ? `, entropy ${fixed(t.entropy, 4)} nats` : "")
        : ", part of the prompt");
  };
  const least = x.tokens.reduce((at, t, i) => (t.top && (at < 0 || t.log_prob < x.tokens[at].log_prob) ? i : at), -1);
  if (least >= 0) tell(x.tokens[least], least); // the least likely one, until a reader points at another
  return h(
    "div",
    { class: "card" },
    h("h2", {}, "Tokens"),
    h(
      "div",
      { class: "legend" },
      ["p > 0.9", "> 0.5", "> 0.1", "> 0.01", "less"].map((t, i) => h("span", { class: `tok t${i}` }, t)),
      h("span", { class: "tok given" }, "part of the prompt"),
      h("span", {}, `log-probs ${x.log_probs_of}`),
    ),
    h(
      "div",
      { class: "tokens" },
      x.tokens.map((t, i) =>
        h(
          "span",
          {
            class:
              "tok " +
              (t.generated && t.log_prob !== undefined ? `t${tone(t.log_prob)}` : "given") +
              (t.text ? "" : " id"),
            tabindex: t.generated ? 0 : null,
            onmouseenter: () => tell(t, i),
            onfocus: () => tell(t, i),
          },
          t.text ? visible(t.text) : `⟨${t.id}⟩`,
        ),
      ),
    ),
    !x.tokens.some((t) => t.text) &&
      h(
        "p",
        { class: "small muted" },
        "These are numbers: start the page with ",
        h("code", {}, "--tokenizer FOLDER"),
        ", the folder of the model, and it shows them as text.",
      ),
    x.more_tokens && h("p", { class: "small muted" }, `and ${whole(x.more_tokens)} more tokens`),
    h(
      "p",
      { class: "small muted" },
      `Point at a token for its ${tops ? "alternatives" : "log-prob and entropy"}, or go through them with Tab.`,
    ),
    says,
    tops ? top : h("p", { class: "small muted" }, "Alternatives are stored with --logits topk:20 of the prompt."),
  );
}

export function conversation(x) {
  const t = x.text;
  if (!t) return null;
  const said = [];
  for (const m of t.messages || []) said.push([m.role, m.content, false, null]);
  for (const turn of t.turns || []) {
    if (!turn.generated) continue;
    said.push([t.said_by || "model", turn.text || "", true, turn.score]);
    if (turn.reply) said.push(["reply", turn.reply, false, null]);
  }
  return h(
    "div",
    { class: "card" },
    h("h2", {}, "Conversation"),
    said.map(([who, what, model, score]) =>
      h(
        "div",
        { class: "turn" + (model ? " model" : "") },
        h("b", {}, who, score !== null && score !== undefined && ` · score ${fixed(score)}`),
        what || "(empty)",
      ),
    ),
  );
}

function waterfall(list) {
  if (!list || list.length === 0) return null;
  const end = Math.max(1e-9, ...list.map((p) => p.begin + p.seconds));
  return h(
    "div",
    { class: "card" },
    h("h2", {}, "Time"),
    h(
      "div",
      { class: "falls" },
      list.map((p) =>
        h(
          "div",
          { class: "fall" },
          h("span", {}, p.name),
          h(
            "svg",
            { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" },
            h("rect", { x: (1000 * p.begin) / end, y: 0, width: Math.max(4, (1000 * p.seconds) / end), height: 14 }),
          ),
          h("span", { class: "num" }, seconds(p.seconds)),
        ),
      ),
    ),
  );
}

const falseColours =
  "Stored latents in false colours: the three directions in which those of the last state differ most. ";

// seen puts what the network takes each state for in place of its false colours, where a sampler of the lane says it:
// the least noisy first, one after the other.
async function seen(run, uid, index, strip, says, colours) {
  for (const img of [...strip.querySelectorAll("img[data-state]")].reverse()) {
    const src = media(run, uid, index, `seen-${img.dataset.state}`);
    try {
      const answer = await fetch(src);
      if (!answer.ok) {
        const said = await answer.json();
        says.textContent = `${colours}What the model sees in each stored state is not shown: ${said.error}.`;
        if (!colours) strip.querySelector(".strip").remove();
        return;
      }
      if (!img.isConnected) return;
      img.src = src;
      img.alt = `what the model sees in state ${img.dataset.state}`;
      img.classList.add("seen");
      says.textContent =
        "What the model sees in each stored state: the image that it would end with, of a video the frame in the middle, decoded by a sampler of the lane.";
    } catch {
      return; // the page is away, which the stream says
    }
  }
}

export async function sampleView(run, uid, index) {
  const x = await ask(api("runs", run, "groups", uid, index));
  const l = x.line,
    at = l.sample_index,
    size = x.group.size,
    staged = x.stages && x.stages.find((t) => t.place === l.place),
    of = staged && staged.samples > 1 ? `samples ${at} to ${at + staged.samples - 1}` : `sample ${at}`,
    name = staged ? `Stage ${staged.stage} of ${of}` : `Sample ${at}`;
  index = l.place;
  const go = (to) => {
    if (to >= 0 && to < size) location.hash = link("runs", run, uid, to);
  };
  const has = (kind) => l.media.includes(kind);
  const moves = has("video") && !stored,
    src = has("image") && media(run, uid, index, moves ? "video" : "image"),
    sound = has("audio") && media(run, uid, index, "audio"),
    alt = `${name}: ${x.prompt.slice(0, 120)}`;
  const picture = h(
    "div",
    { class: "pic" },
    src
      ? moves
        ? [
            video(src, alt, l.width, l.height),
            downloads(src, media(run, uid, index, "mp4"), `${run}-${uid}-${index}`),
          ]
        : h("img", { src, alt, class: Math.max(l.width, l.height) < 256 ? "smallpic" : "" })
      : !sound && h("p", {}, x.error || `no image${l.media.length > 0 ? " in this file" : ""}`),
    sound && player(sound, name),
  );
  const score = h(
    "div",
    { class: "card" },
    h("h2", {}, "Reward"),
    h(
      "div",
      { class: "line tools" },
      h("span", { class: "reward" }, x.reward === null ? badge(x.status) : fixed(x.reward, 4)),
      advantage(x.advantage),
      x.reward !== null &&
        h("span", { class: "small muted" }, `group: mean ${fixed(x.group.mean)}, std ${fixed(x.group.std)}`),
    ),
    scores(x.scores, x.reward),
    faults(x),
    todo(l.fix),
  );
  const facts = h(
    "div",
    { class: "card" },
    h("h2", {}, "Facts"),
    factList(
      x.facts,
      x.attempts &&
        x.attempts.length > 0 && [
          h("dt", {}, "Attempts"),
          h(
            "dd",
            {},
            x.attempts.length === 1
              ? h("span", {}, "one, ", h("span", { class: "mono" }, x.attempts[0].attempt))
              : x.attempts.map((a) =>
                  h("div", {}, `steps ${a.first} to ${a.last}: `, h("span", { class: "mono" }, a.attempt)),
                ),
          ),
        ],
    ),
  );
  const colours = x.coloured ? falseColours : "",
    sees = h("p", { class: "small muted", role: "status" }, colours);
  const strip =
    x.states.length > 1 &&
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Denoising"),
      sees,
      h(
        "div",
        { class: "strip", tabindex: 0, role: "group", "aria-label": "stored states" },
        x.states.map((k) =>
          h(
            "figure",
            {},
            h("img", {
              src: x.coloured && media(run, uid, index, k),
              alt: `state ${k}`,
              loading: "lazy",
              width: 96,
              height: 96,
              "data-state": k,
            }),
            h("figcaption", {}, `${k}`, x.rollout && ` · σ ${fixed(x.rollout.sigmas[k], 2)}`),
          ),
        ),
        has("image") &&
          h(
            "figure",
            {},
            h("img", { src: media(run, uid, index, "image"), alt: "the image", width: 96, height: 96 }),
            h("figcaption", {}, "image"),
          ),
      ),
    );
  const look = () => seen(run, uid, index, strip, sees, colours);
  if (strip && x.coloured) look();
  else if (strip) {
    const ask = h("button", { onclick: () => (ask.remove(), (sees.textContent = "A sampler decodes it."), look()) }, "Show what the model sees");
    sees.before(ask); // to decode a video takes a while
  }
  return {
    title: staged ? `${name} of ${uid}` : `#${at} of ${uid}`,
    keys: { j: () => go(at + 1), k: () => go(at - 1) },
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          crumbs(
            h("a", { href: "#/runs" }, "Runs"),
            h("a", { href: link("runs", run) }, run),
            h("a", { href: link("runs", run, uid) }, uid),
          ),
          h("h1", {}, name),
          h("p", { class: "muted clamp" }, x.prompt),
        ),
        h(
          "div",
          { class: "tools" },
          h("button", { disabled: at === 0, onclick: () => go(at - 1), "aria-label": "previous sample" }, "← Previous"),
          h("button", { disabled: at + 1 >= size, onclick: () => go(at + 1), "aria-label": "next sample" }, "Next →"),
        ),
      ),
      staged && stageRows(run, x, l.place),
      h(
        "div",
        { class: "shot" },
        h("div", { class: "stack" }, x.text ? [conversation(x), conditions(run, uid, l), tokens(x)] : [picture, conditions(run, uid, l), strip]),
        h("div", { class: "stack" }, x.samples && x.samples.length > 1 ? null : score, facts),
      ),
      x.text ? waterfall(x.timings) : curves(x),
      x.text ? null : steps(x),
    ].filter(Boolean),
    start: (again) =>
      listen(
        { run },
        x.group.status === "open" && {
          groups: ({ rows }) => {
            if (rows.some((r) => r.uid === uid && (r.status !== "open" || x.reward === null))) again();
          },
        },
      ),
  };
}
