package command

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/rescore"
	"github.com/meander-rl/meander/services/reward"
)

// rescoreCommand makes the command 'meander rescore'.
func rescoreCommand(a *app) *cobra.Command {
	r := &rescorer{app: a, services: defaultServices(), advantage: fieldsOfPrompt().Part("advantage")}
	c := &cobra.Command{
		Use:   "rescore --reward NAME[=WEIGHT]",
		Short: "score the stored images of a run again, with other rewards or another estimator",
		Long: `rescore scores the stored trajectories of a run again. It samples nothing. The rewards and advantages
go into a run of their own, the pass, with the same uids and batches; the run itself does not change.
Without --reward the pass has the rewards of the run, without estimator flags its estimator.

A pass does not refill groups. It uses the verdicts (external) that the run has. This process scores
the images. The advantages come from the pipeline that runs on the store or server, else from this
process.

Scores are stored at once: after a crash, the same command continues where it stopped.

Exit status: 0 all groups are complete, 1 some are not, 2 wrong usage.`,
		Example: `  meander rescore --reward ocr
  meander rescore --run demo --reward glyph=0.8 --reward jpeg_compressibility=0.01 --pass mixed
  meander rescore --run demo --reward http:clip --scorers scorers.yaml --json
  meander rescore --run demo --estimator rloo
  meander show --run demo--ocr 0000-a-sign`,
		RunE: func(c *cobra.Command, _ []string) error {
			r.set = c.Flags().Changed
			return r.rescore(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar((*string)(&r.run), "run", "", "run whose images are scored; default the latest")
	f.StringVar((*string)(&r.pass), "pass", "", "run for the new rewards; default <run>--<rewards>")
	addSection(f, rewardSection, r.rewards.addFlags)
	addSection(f, advantageSection, func(f *pflag.FlagSet) { r.advantage.Register(f) })
	r.services.bind().Register(f, "scorers", "score_patience")
	f.StringVar(&r.out, "out", "", "folder for results.jsonl; default meander-out/<pass>; - for none")
	return c
}

// rescorer is one rescore command.
type rescorer struct {
	*app
	run, pass schemas.Run
	rewards   rewardFlags
	advantage *fields.Set
	services  services
	out       string
	set       func(flag string) bool
}

// rescore makes the pass: it checks the request, scores the samples, waits for the advantages and prints the results.
// The same command continues a pass that was interrupted.
func (r *rescorer) rescore(ctx context.Context, stdout, stderr io.Writer) error {
	log := r.logger()
	if len(r.rewards.atSteps) > 0 {
		return usage(errors.New("--at-steps: given; must be absent: stored samples are judged as they ended"))
	}
	change, err := r.changeOf()
	if err != nil {
		return usage(err)
	}
	if err := r.services.validate(); err != nil {
		return err
	}
	conn, err := r.openExisting(ctx, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	began := time.Now()
	if err := r.namePass(ctx, conn, change); err != nil {
		return err
	}
	source, err := rescore.Read(ctx, conn.Bus, r.run)
	if err != nil {
		return asUsage(err)
	}
	if source.Staged {
		return usage(fmt.Errorf("--run: %q has samples of several stages, which are not scored again; publish its "+
			"prompts with other rewards", r.run))
	}
	if err := source.Apply(r.run, change); err != nil {
		return usage(err)
	}
	if err := reward.CheckNames(r.services.Reward, source.RewardNames()); err != nil {
		return usage(err)
	}
	if err := tryFolder("--out", outFolder(r.out, r.pass)); err != nil {
		return usage(err)
	}
	if err := source.Claim(ctx, conn.Bus, r.pass, change); err != nil {
		return asUsage(err)
	}
	if source.Refills {
		fmt.Fprintln(stderr, "a pass does not refill groups; groups that the run would refill are kept")
	}
	advantages, err := r.scoreAndWait(ctx, conn, source, stderr, log)
	switch {
	case ctx.Err() != nil && err != nil:
		return errors.New("interrupted; the same command continues where it stopped")
	case err != nil:
		return err
	}
	return r.report(context.WithoutCancel(ctx), conn, source, advantages, time.Since(began), stdout, stderr)
}

// changeOf returns how the pass differs from the run, by the flags; without any it is an error.
func (r *rescorer) changeOf() (rescore.Change, error) {
	c := rescore.Change{GroundTruth: schemas.Truth(r.rewards.groundTruth)}
	specs, err := r.rewards.rewardSpecs()
	if err != nil {
		return c, err
	}
	body := map[string]any{"v": int64(schemas.Version), "prompt": `"-" 1`} // each group has its own
	names := fieldFlags{set: r.advantage.Flags(false)}
	if given := r.advantage.GivenValues(); len(given) > 0 {
		body["advantage"] = given
	}
	if specs != nil {
		body["reward"], names.set["reward"] = specs, "reward"
	}
	q := prompt{body: body}
	q.setGroundTruth(cmp.Or(r.rewards.groundTruth, "1"))
	p, err := checkPrompt(q.body, names)
	if err != nil {
		return c, err
	}
	for _, spec := range p.Reward {
		spec.GroundTruth = ""
		schemas.SetDefaults(&spec)
		c.Rewards = append(c.Rewards, spec)
	}
	if body["advantage"] != nil {
		config, err := estimatorConfig(r.advantage)
		if err != nil {
			return c, err
		}
		c.Advantage, c.BasisGiven = &config, p.Advantage.StdBasis != ""
	}
	if len(c.Rewards) == 0 && c.Advantage == nil {
		return c, errors.New("--reward: name the reward functions, or another estimator with --estimator")
	}
	return c, nil
}

// namePass sets the run to the latest and makes a name of the pass, if they were not given. The pass is named by its
// rewards, or its estimator. Names that cannot be are usage errors.
func (r *rescorer) namePass(ctx context.Context, conn *connection, c rescore.Change) (err error) {
	if r.run == "" {
		if r.run, err = latestRun(ctx, conn.Bus); err != nil {
			return err
		}
	}
	if r.pass == "" {
		var names []string
		for _, spec := range c.Rewards {
			names = append(names, strings.ReplaceAll(spec.Name, ":", "-"))
		}
		if len(names) == 0 {
			names = []string{c.Advantage.Name}
		}
		r.pass = r.run + "--" + schemas.Run(strings.Join(names, "-"))
		if len(r.pass) > schemas.MaxToken {
			sum := sha256.Sum256([]byte(r.pass))
			r.pass = r.pass[:schemas.MaxToken-9] + "-" + schemas.Run(hex.EncodeToString(sum[:4]))
		}
	}
	if err := errors.Join(schemas.CheckToken("--run", r.run), schemas.CheckToken("--pass", r.pass)); err != nil {
		return usage(err)
	}
	if r.pass == r.run {
		return usage(fmt.Errorf("--pass: %q is the run itself; choose another name", r.pass))
	}
	return nil
}

// scoreAndWait scores the samples without a reward, and waits until every group of the pass has a result. If no other
// process closes the groups, this one does. An error is of a reward function's service, the server or ctx.
func (r *rescorer) scoreAndWait(
	ctx context.Context, conn *connection, source *rescore.Source, stderr io.Writer, log zerolog.Logger,
) (map[schemas.UID]*schemas.Advantage, error) {
	if err := source.OpenGroups(ctx, conn.Bus, r.pass); err != nil {
		return nil, err
	}
	have, err := conn.Subjects(ctx, schemas.StreamRewards, schemas.RewardFilter(r.pass, "*", "*"))
	if err != nil {
		return nil, fmt.Errorf("look up rewards of %s: %w", r.pass, err)
	}
	todo := source.Samples(have)
	if n := source.Size() - len(todo); n > 0 {
		fmt.Fprintf(stderr, "pass %s: %d of %d samples are scored already, resuming\n", r.pass, n, source.Size())
	}
	progress := newCounted(stderr, r.json, fmt.Sprintf("pass %s: ", r.pass), "samples", len(todo))
	defer progress.end()

	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var service errgroup.Group
	service.Go(func() error {
		err := conn.serveWhenOwner(work,
			func(ctx context.Context) error { return advantage.Run(ctx, r.services.Advantage, conn.Bus, log) })
		if err != nil {
			stop(err)
		}
		return err
	})
	err = reward.Rescore(work, r.services.Reward, conn.Bus, log, reward.Pass{
		Samples: todo, Done: progress.count,
		Change: func(t *schemas.Trajectory) { source.Join(t, r.pass) },
	})
	var advantages map[schemas.UID]*schemas.Advantage
	if err == nil {
		advantages, err = source.Advantages(work, conn.Bus, r.pass)
	}
	if cause := context.Cause(work); err != nil && cause != nil {
		err = cause
	}
	stop(nil)
	if serveErr := service.Wait(); err == nil && serveErr != nil && !errors.Is(serveErr, context.Canceled) {
		err = serveErr
	}
	return advantages, err
}

// report writes the results of the pass to its folder and prints them. Groups that are not complete give exit status 1.
func (r *rescorer) report(
	ctx context.Context, conn *connection, source *rescore.Source, advantages map[schemas.UID]*schemas.Advantage,
	took time.Duration, stdout, stderr io.Writer,
) error {
	p, err := results.CollectPass(ctx, conn.Bus, r.pass, r.run, source.Groups(advantages))
	if err != nil {
		return err
	}
	p.Summary.Seconds = took.Seconds()
	if dir := outFolder(r.out, r.pass); dir != "" {
		if err := p.Write(dir); err != nil {
			return err
		}
	}
	if r.json {
		err = p.WriteJSON(stdout)
	} else {
		printPass(stdout, p)
	}
	if err != nil {
		return err
	}
	return notComplete(p.Groups, func(g *results.PassGroup) string { return g.Status })
}

// asUsage makes a rescore.RequestError a usage error.
func asUsage(err error) error {
	if refused, ok := errors.AsType[*rescore.RequestError](err); ok {
		return usage(refused)
	}
	return err
}

// printPass prints the table of a pass for people: each value of the run, and beside it that of the pass.
func printPass(w io.Writer, p *results.Pass) {
	var t *present.Table
	if len(p.Groups) <= fewGroups {
		t = present.New("GROUP", "SAMPLE", "READ", "REWARD", "NOW", "ADVANTAGE", "NOW")
		for _, g := range p.Groups {
			for _, m := range g.Members {
				after := m.Status
				if m.Reward != nil {
					after = results.Number(m.Reward, "%.3f")
				}
				t.Row(g.UID, fmt.Sprintf("#%d", m.SampleIndex), readText(m.Scores),
					results.Number(m.SourceReward, "%.3f"), after, results.Number(m.SourceAdvantage, "%+.3f"),
					results.Number(m.Advantage, "%+.3f"))
			}
		}
	} else {
		t = present.New("GROUP", "STATUS", "MEAN", "NOW", "STD", "NOW")
		for _, g := range p.Groups {
			t.Row(g.UID, g.Status, results.Number(g.SourceMean, "%.3f"), results.Number(g.Mean, "%.3f"),
				results.Number(g.SourceStd, "%.3f"), results.Number(g.Std, "%.3f"))
		}
	}
	t.Print(w)
	s := p.Summary
	fmt.Fprintf(w, "\npass %s over run %s: %d of %d groups complete, %d of %d samples scored, %.1f s\ndigest %s\n",
		s.Run, s.Source, s.Complete, s.Groups, s.Scored, s.Samples, s.Seconds, s.Digest)
	for _, line := range faultsOf(p) {
		fmt.Fprintln(w, line)
	}
	if s.Out != "" {
		fmt.Fprintf(w, "results %s\n", filepath.Join(s.Out, "results.jsonl"))
	}
}

// readText returns what the first reward function that reads images has read; "" if there is none.
func readText(scores []view.Score) string {
	for _, s := range scores {
		if scorer.Reads(s.Name) {
			return (&view.Member{Scores: scores}).ReadBy(s.Name)
		}
	}
	return ""
}

// faultsOf says why samples of a pass failed, each reason once with its number.
func faultsOf(p *results.Pass) []string {
	counts := map[string]int{}
	for _, g := range p.Groups {
		for _, m := range g.Members {
			if m.Status != schemas.StatusScored && m.Error != "" {
				counts[present.FirstLine(m.Error)]++
			}
		}
	}
	const most = 5
	var out []string
	for _, text := range sortedKeys(counts) {
		if len(out) == most {
			return append(out, fmt.Sprintf("and %d others", len(counts)-most))
		}
		out = append(out, fmt.Sprintf("%s failed: %s", present.Count(counts[text], "sample"), strings.TrimSpace(text)))
	}
	return out
}
