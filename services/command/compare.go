package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// runsCompareCommand makes the command 'meander runs compare'.
func runsCompareCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "compare RUN RUN", Args: cobra.ExactArgs(2),
		Short: "compare the rewards of the prompts that two runs have",
		Long: `compare joins the groups of two runs that have the same uid, or else the same prompt. It prints in which
settings the runs differ, the mean rewards, how much the second run is better with the standard error of that
over prompts, and the prompts with the largest changes.`,
		Example: "  meander runs compare night morning",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, name := range given {
				if _, err := storedRun(c.Context(), conn.Bus, name); err != nil {
					return err
				}
			}
			return a.compareRuns(c.Context(), conn, schemas.Run(given[0]), schemas.Run(given[1]), c.OutOrStdout())
		}),
	}
}

// compareRuns prints the comparison of two runs.
func (a *app) compareRuns(ctx context.Context, conn *connection, first, second schemas.Run, out io.Writer) error {
	reader := newReader(ctx, conn.Bus, true)
	defer reader.Close()
	x, err := reader.Compare(ctx, first, second, 0)
	if err != nil {
		return err
	}
	if a.json {
		return encode(out, x)
	}
	if x.Total == 0 {
		return usage(fmt.Errorf("runs %s and %s have no prompt in common", first, second))
	}
	t := present.New("SETTING", string(first), string(second))
	for _, s := range x.Settings {
		t.Row(s.Name, present.OrDash(s.A), present.OrDash(s.B))
	}
	t.Print(out)
	t = present.New("PROMPT", string(first), string(second), "CHANGE")
	t.Row(fmt.Sprintf("all %d", x.Total), results.Number(x.MeanA, "%.3f"), results.Number(x.MeanB, "%.3f"),
		changeLine(x))
	for i := range x.Pairs[:min(len(x.Pairs), mostPairs)] {
		p := &x.Pairs[i]
		t.Row(present.Cut(cmp.Or(p.Prompt, string(p.A.UID)), 60), results.Number(p.A.Mean, "%.3f"),
			results.Number(p.B.Mean, "%.3f"), results.Number(p.Change, "%+.3f"))
	}
	fmt.Fprintln(out)
	t.Print(out)
	fmt.Fprintf(out, "\n%s is better at %s, worse at %d, equal at %d\n", second, present.Count(x.Better, "prompt"),
		x.Worse, x.Equal)
	return nil
}

// mostPairs is how many prompts a comparison lists.
const mostPairs = 10

// changeLine returns the mean change of a comparison with its standard error, where there is one.
func changeLine(x *view.Comparison) string {
	if x.MeanA == nil {
		return present.OrDash("")
	}
	line := fmt.Sprintf("%+.3f", *x.MeanB-*x.MeanA)
	if x.ChangeError != nil {
		line += fmt.Sprintf(" ± %.3f", *x.ChangeError)
	}
	return line
}

// policyCompareCommand makes the command 'meander policy compare'.
func policyCompareCommand(a *app) *cobra.Command {
	r := &runner{app: a, services: defaultServices()}
	c := &cobra.Command{
		Use: "compare VERSION VERSION [PROMPT ...]", Args: cobra.ArbitraryArgs,
		Short: "make the same samples with two versions of the weights, and compare their rewards",
		Long: `compare makes a run with each of two versions of a lane, both at once, of the same prompts, seeds and noise,
and compares their rewards. What trains goes on: samplers hold the versions beside the newest (--resident-versions). The
runs are NAME-v1 and NAME-v3; the same command goes on with runs that were left. Seeds are 0 where --seed and the file
of prompts say nothing.`,
		Example: `  meander policy compare 0 3 --prompts held-out.txt --validation
  meander policy compare 1 3 'a red sign that says "OPEN"' --group-size 16 --run check`,
		RunE: func(c *cobra.Command, given []string) error {
			versions, err := twoVersions(given)
			if err == nil && r.prompts.DryRun {
				err = usage(errors.New("--dry-run: given; must be absent: 'meander run --dry-run' prints what one " +
					"of the two runs takes"))
			}
			if err == nil {
				err = r.check()
			}
			if err != nil {
				return err
			}
			if err := r.fetchPrompts(c.Context(), &r.prompts.datasetFlags); err != nil {
				return err
			}
			r.stdin = c.InOrStdin()
			prompts, err := r.prompts.load(given[2:], c.InOrStdin(), true)
			if err != nil {
				return err
			}
			for _, p := range prompts {
				if p.body["policy_version"] != nil {
					return usage(fmt.Errorf("policy_version (--at-version): given of prompt %q; must be absent: "+
						"compare names the versions", p.uid))
				}
			}
			name := r.id
			r.beside = &runner{app: a, prompts: r.prompts, Out: r.Out}
			for i, run := range r.all() {
				run.id = schemas.Run(fmt.Sprintf("%s-v%d", name, versions[i]))
				run.given = withVersion(prompts, versions[i])
			}
			if err := r.run(c.Context(), r.given, io.Discard, c.ErrOrStderr()); err != nil {
				return err
			}
			return a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
				return a.compareRuns(c.Context(), conn, r.id, r.beside.id, c.OutOrStdout())
			})(c, nil)
		},
	}
	addSection(c.Flags(), outputSection, func(f *pflag.FlagSet) { r.output(f, "out") })
	r.prompts.addFlags(c.Flags())
	addSection(c.Flags(), pipelineSection, func(f *pflag.FlagSet) { pipelineFlags(f, &r.services) })
	addSection(c.Flags(), limitSection, r.services.limits.Flags)
	return c
}

// twoVersions reads the arguments VERSION VERSION.
func twoVersions(given []string) (versions [2]int64, err error) {
	if len(given) < 2 {
		return versions, usage(errors.New("VERSION VERSION: must be the numbers of two versions, see 'meander " +
			"policy ls'"))
	}
	for i := range versions {
		if versions[i], err = strconv.ParseInt(given[i], 10, 64); err != nil || versions[i] < 0 {
			return versions, usage(fmt.Errorf("VERSION: %q; must be the number of a version, see 'meander policy ls'",
				given[i]))
		}
	}
	if versions[0] == versions[1] {
		return versions, usage(fmt.Errorf("VERSION: %d twice; must be two versions", versions[0]))
	}
	return versions, nil
}

// checkVersion refuses a version that the lane cannot go back to, before samples are made with the other.
func (r *runner) checkVersion(ctx context.Context, conn *connection) error {
	checked := map[schemas.Lineage]bool{}
	for _, p := range r.given {
		lane := schemas.Lane(cmp.Or(p.textField("model"), string(r.with.Model)))
		of := lane.Of(schemas.Tenant(p.textField("tenant")))
		version, named := p.body["policy_version"].(int64)
		if checked[of] || !named {
			continue
		}
		checked[of] = true
		current, err := conn.Policy(ctx, of)
		if errors.Is(err, bus.ErrNotFound) {
			continue // intake says so
		}
		if err != nil {
			return err
		}
		_, unfit, err := conn.EarlierPolicy(ctx, current, version)
		if errors.Is(err, bus.ErrNotFound) {
			unfit, err = err, nil
		}
		if unfit != nil {
			err = usage(fmt.Errorf("VERSION: %d; %w", version, unfit))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// withVersion returns the prompts for one version of the weights.
func withVersion(prompts []prompt, version int64) (out []prompt) {
	for _, p := range prompts {
		p.body = maps.Clone(p.body)
		if p.body["policy_version"] = version; p.body["seed"] == nil {
			p.body["seed"] = int64(0)
		}
		out = append(out, p)
	}
	return out
}
