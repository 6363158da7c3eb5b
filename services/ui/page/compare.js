// Two runs side by side: their rewards over time, and the prompts that both have.
import { h, link, fixed, signed, plural, badge, crumbs, empty, only } from "./dom.js";
import { ask, api } from "./server.js";
import { chart } from "./chart.js";
import { differences } from "./settings.js";

// merge puts the curves of two runs on one axis.
function merge(a, b) {
  const x = [...new Set([...a, ...b].map((p) => p.number))].sort((m, n) => m - n);
  const on = (points) => {
    const at = new Map(points.map((p) => [p.number, p.mean]));
    return x.map((n) => at.get(n) ?? undefined);
  };
  return { x, a: on(a), b: on(b) };
}

export async function compareView(query) {
  const a = query.get("a") || "",
    b = query.get("b") || "";
  let offset = 0;
  const load = () => ask("compare", { a, b, offset });
  const [first, ca, cb] = await Promise.all([load(), ask(api("runs", a, "curve")), ask(api("runs", b, "curve"))]);
  const both = merge(ca.points, cb.points),
    rows = h("tbody"),
    more = h("div", { class: "pager" });
  const samples = async (box, p) => {
    if (box.children.length > 0) {
      only(box);
      return;
    }
    const groups = await Promise.all(
      [
        [a, p.a.uid],
        [b, p.b.uid],
      ].map(([run, uid]) => ask(api("runs", run, "groups", uid), { limit: 64 })),
    );
    only(
      box,
      groups.map((g) =>
        h(
          "div",
          {},
          h(
            "p",
            { class: "small muted" },
            h("a", { href: link("runs", g.run, g.uid) }, `${g.run} · ${g.uid}`),
            ` · mean ${fixed(g.mean)}`,
          ),
          h(
            "div",
            { class: "strip", tabindex: 0, role: "group", "aria-label": `samples of ${g.run}` },
            [...g.samples]
              .sort((m, n) => m.sample_index - n.sample_index)
              .map((s) =>
                h(
                  "figure",
                  {},
                  h(
                    "a",
                    { href: link("runs", g.run, g.uid, s.sample_index) },
                    s.media.includes("image")
                      ? h("img", {
                          src: "/media/" + api(g.run, g.uid, s.sample_index, "image"),
                          alt: `sample ${s.sample_index}`,
                          loading: "lazy",
                          width: 96,
                          height: 96,
                        })
                      : h("span", { class: "clamp small" }, s.answer || s.status),
                  ),
                  h("figcaption", {}, `#${s.sample_index} · ${fixed(s.reward, 2)}`),
                ),
              ),
          ),
        ),
      ),
    );
  };
  const draw = (x) => {
    rows.append(
      ...x.pairs.flatMap((p) => {
        const box = h("td", { colspan: 5, class: "pairs" }),
          detail = h("tr", { hidden: true }, box);
        const open = h(
          "button",
          {
            "aria-expanded": "false",
            "data-item": true,
            onclick: async () => {
              detail.hidden = !detail.hidden;
              open.setAttribute("aria-expanded", String(!detail.hidden));
              if (!detail.hidden && box.children.length === 0) await samples(box, p);
            },
          },
          "Samples",
        );
        return [
          h(
            "tr",
            {},
            h("td", { class: "prompt" }, h("span", { class: "clamp" }, p.prompt || p.a.uid)),
            h("td", { class: "n" }, fixed(p.a.mean)),
            h("td", { class: "n" }, fixed(p.b.mean)),
            h(
              "td",
              { class: "n" },
              p.change === null
                ? badge(p.b.status === "open" ? "open" : "no mean")
                : h("span", { class: "adv " + (p.change > 0 ? "up" : p.change < 0 ? "down" : "") }, signed(p.change)),
            ),
            h("td", { class: "n" }, open),
          ),
          detail,
        ];
      }),
    );
    offset += x.pairs.length;
    only(
      more,
      h(
        "span",
        { class: "small muted" },
        `${offset} of ${plural(x.total, "prompt")} that both runs have, the largest changes first`,
      ),
      offset < x.total && h("button", { onclick: async () => draw(await load()) }, "More"),
    );
  };
  draw(first);
  const stat = (name, value, says) =>
    h(
      "div",
      { class: "stage" },
      h("span", { class: "name" }, name),
      h("span", { class: "big" }, value),
      h("span", { class: "small muted" }, says),
    );
  return {
    title: `${a} and ${b}`,
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          crumbs(h("a", { href: "#/runs" }, "Runs")),
          h("h1", {}, h("a", { href: link("runs", a) }, a), " and ", h("a", { href: link("runs", b) }, b)),
          h("p", { class: "muted" }, "The prompts that both runs have, by uid, or else by their text."),
        ),
      ),
      h(
        "div",
        { class: "stages" },
        stat(a, fixed(first.mean_a), "mean reward of these prompts"),
        stat(
          b,
          fixed(first.mean_b),
          first.mean_a === null
            ? "mean reward of these prompts"
            : `${signed(first.mean_b - first.mean_a)}${
                first.change_error === null ? "" : ` ± ${fixed(first.change_error)}`
              } of ${a}`,
        ),
        stat("better", String(first.better), `prompts, by ${b}`),
        stat("worse", String(first.worse), `prompts; ${first.equal} are equal`),
      ),
      differences(a, b, first.settings),
      both.x.length > 0 &&
        h(
          "div",
          { class: "card" },
          h("h2", {}, "Reward over time"),
          chart({
            title: `mean rewards of ${a} and ${b}`,
            x: { label: "groups closed", values: both.x },
            series: [
              { label: a, values: both.a, gaps: true },
              { label: b, values: both.b, tone: "--warn", dashed: true, gaps: true },
            ],
          }),
        ),
      h(
        "div",
        { class: "card flush" },
        first.total === 0
          ? empty(
              "They have no prompt in common",
              h("p", {}, "Publish the same prompts, with the same seeds, to both runs."),
            )
          : [
              h(
                "div",
                { class: "scroll", tabindex: 0, role: "group", "aria-label": "prompts" },
                h(
                  "table",
                  {},
                  h(
                    "thead",
                    {},
                    h(
                      "tr",
                      {},
                      [
                        ["Prompt", ""],
                        [a, "n"],
                        [b, "n"],
                        ["Change", "n"],
                        ["Samples", "n"],
                      ].map(([t, c]) => h("th", { class: c }, t)),
                    ),
                  ),
                  rows,
                ),
              ),
              more,
            ],
      ),
    ].filter(Boolean),
  };
}
