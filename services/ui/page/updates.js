// The updates of the weights that trainers tell: a curve for each of their numbers, one line for each trainer.
import { h, plural, ago, only, whole } from "./dom.js";
import { ask, api } from "./server.js";
import { chart, short } from "./chart.js";

const tones = ["--accent", "--warn", "--info", "--bad", "--good", "--muted"];
const maxCharts = 24;

// nameOf is the name of a trainer, with its lane where trainers of several are there.
const laneOf = (t) => (t.tenant === "main" ? t.lane : `${t.lane}.${t.tenant}`);
const nameOf = (t, all) => (all.every((o) => laneOf(o) === laneOf(t)) ? t.trainer : `${t.trainer} of ${laneOf(t)}`);

// figure is the chart of one number: the updates of all trainers on one axis.
function figure(name, trainers) {
  const mine = trainers.filter((t) => t.curves[name]).slice(0, tones.length);
  const steps = [...new Set(mine.flatMap((t) => t.steps))].sort((a, b) => a - b);
  const series = mine.map((t, i) => {
    const at = new Map(t.steps.map((s, k) => [s, t.curves[name][k] ?? undefined]));
    const values = steps.map((s) => at.get(s));
    return { label: nameOf(t, trainers), values, tone: tones[i], dashed: i % 2 === 1, gaps: true };
  });
  const last = series.map((s) => `${s.label} ${short(s.values.findLast((v) => v !== undefined))}`);
  return h(
    "div",
    {},
    h("h3", {}, name.replaceAll("_", " ")),
    h("p", { class: "small muted num" }, last.join(" · ")),
    chart({ title: `${name} by update: ${last.join(", ")}`, x: { label: "updates", values: steps }, height: 160, series }),
  );
}

// updatesCard shows the updates of a run; draw(count) asks again where another number of them is told.
export function updatesCard(run) {
  const card = h("div", { class: "card", id: "updates", hidden: true });
  let shown = 0,
    asking = false;
  const show = (u) => {
    for (const old of card.querySelectorAll(".chart")) old.stop();
    card.hidden = u.trainers.length === 0;
    const many = u.numbers.length - maxCharts;
    only(
      card,
      h("div", { class: "cardhead" }, h("h2", {}, "Training")),
      u.trainers.map((t) =>
        h(
          "p",
          { class: "small muted" },
          `${nameOf(t, u.trainers)}: ${plural(t.count, "update")} of ${laneOf(t)}, version ${whole(t.policy_version)}`,
          t.at > 0 && `, the last ${ago(t.at)}`,
          t.left_out > 0 && `; ${whole(t.left_out)} older ones are not in the curves`,
        ),
      ),
      h(
        "div",
        { class: "figures" },
        u.numbers.slice(0, maxCharts).map((name) => figure(name, u.trainers)),
      ),
      many > 0 && h("p", { class: "small muted" }, `${plural(many, "more number")}: meander show --json --run ${run}`),
    );
  };
  const draw = async (count) => {
    if (!count || count === shown || asking) return;
    asking = true;
    try {
      show(await ask(api("runs", run, "updates")));
      shown = count;
    } catch {
      /* the stream says it; the next progress asks again */
    }
    asking = false;
  };
  return { card, draw };
}
