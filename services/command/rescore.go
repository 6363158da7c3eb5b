package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/reward"
)

func rescoreCommand(a *app) *cobra.Command {
	r := &rescorer{app: a, services: defaultServices()}
	c := &cobra.Command{
		Use:   "rescore --reward NAME[=WEIGHT]",
		Short: "score the stored images of a run again, with other rewards or another estimator",
		Long: `rescore scores the trajectories that a run has stored, without sampling anything. The
rewards and advantages go into a run of their own, the pass, with the same uids and
batches; those of the run stay as they are. Without --reward the rewards are those of
the run; without flags of the estimator, so is the estimator.

Groups are not refilled in a pass: they are kept, whatever their policy says. Verdicts
(external) are those the run has. The images are scored in this process; advantages
come from the pipeline that runs on the store or server, or from this process.

What is scored is stored: after a crash or a kill, the same command goes on where it
stopped.

Exit status: 0 all groups complete, 1 some are not, 2 wrong usage.`,
		Example: `  meander rescore --reward ocr
  meander rescore --run demo --reward glyph=0.8 --reward jpeg_compressibility=0.01 --pass mixed
  meander rescore --run demo --reward http:clip --scorers scorers.yaml --json
  meander rescore --run demo --estimator rloo
  meander show --run demo--ocr 0000-a-sign`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			r.set = c.Flags().Changed
			return r.rescore(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar((*string)(&r.run), "run", "", "the run whose images are scored; default the latest")
	f.StringVar((*string)(&r.pass), "pass", "", "the run that the rewards go into; default <run>--<rewards>")
	section(f, rewardSection, r.rewards.register)
	section(f, advantageSection, r.advantage.register)
	f.StringVar(&r.services.Reward.Scorers, "scorers", "", "YAML file that configures http:NAME, onnx:NAME and nats:NAME reward functions")
	f.DurationVar(&r.services.Reward.ScorePatience, "score-patience", r.services.Reward.ScorePatience, "how long a sample is tried again while a reward function is not available")
	f.StringVar(&r.out, "out", "", "folder for results.jsonl; default meander-out/<pass>; - for none")
	return c
}

// rescorer is one rescore command.
type rescorer struct {
	*app
	run, pass schemas.Run
	rewards   rewardFlags
	advantage advantageFlags
	services  services
	out       string
	set       func(flag string) bool
}

func (r *rescorer) rescore(ctx context.Context, stdout, stderr io.Writer) error {
	log, err := r.logger()
	if err != nil {
		return err
	}
	change, err := r.changes()
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
	if err := r.name(ctx, conn, change); err != nil {
		return err
	}
	source, err := readSource(ctx, conn.Bus, r.run)
	if err != nil {
		return err
	}
	if err := source.apply(r.run, change); err != nil {
		return usage(err)
	}
	if err := reward.CheckNames(r.services.Reward, source.rewardNames()); err != nil {
		return usage(err)
	}
	if err := tryFolder("--out", outFolder(r.out, r.pass)); err != nil {
		return usage(err)
	}
	if err := r.claim(ctx, conn, change); err != nil {
		return err
	}
	if source.refills {
		fmt.Fprintln(stderr, "groups are not refilled in a pass; those that do not count are kept")
	}
	advantages, err := r.serve(ctx, conn, source, stderr, log)
	switch {
	case ctx.Err() != nil && err != nil:
		return errors.New("interrupted; the same command goes on where it stopped")
	case err != nil:
		return err
	}
	return r.report(context.WithoutCancel(ctx), conn, source, advantages, time.Since(began), stdout, stderr)
}

// changes are what the flags ask for.
func (r *rescorer) changes() (change, error) {
	c := change{groundTruth: r.rewards.groundTruth}
	specs, err := r.rewards.rewards()
	if err != nil {
		return c, err
	}
	if c.rewards, err = rewardSpecs(specs); err != nil {
		return c, err
	}
	if given := r.advantage.advantage.Values(); len(given) > 0 {
		config, err := r.advantage.config(specs)
		if err != nil {
			return c, err
		}
		c.advantage, c.basisGiven = &config, given["std_basis"] != nil
	}
	if len(c.rewards) == 0 && c.advantage == nil {
		return c, errors.New("--reward: name the reward functions, or another estimator with --estimator")
	}
	return c, nil
}

// name settles the names of run and pass.
func (r *rescorer) name(ctx context.Context, conn *connection, c change) (err error) {
	if r.run == "" {
		if r.run, err = latestRun(ctx, conn.Bus); err != nil {
			return err
		}
	}
	if r.pass == "" {
		var names []string
		for _, spec := range c.rewards {
			names = append(names, strings.ReplaceAll(spec.Name, ":", "-"))
		}
		if len(names) == 0 {
			names = []string{c.advantage.Name}
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

// claim writes what the pass is on first use; the name of another one is refused.
func (r *rescorer) claim(ctx context.Context, conn *connection, c change) error {
	type passSpec struct {
		Source  schemas.Run `json:"source_run"`
		Digest  string      `json:"digest"`
		Created int64       `json:"created"`
	}
	what, err := json.Marshal([]any{r.run, c.rewards, c.groundTruth, c.advantage})
	if err != nil {
		return err
	}
	sum := sha256.Sum256(what)
	mine := passSpec{r.run, hex.EncodeToString(sum[:]), time.Now().UnixNano()}
	data, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	have, created, err := conn.CreateRun(ctx, r.pass, data)
	if err != nil || created {
		return err
	}
	var old passSpec
	if err := json.Unmarshal(have, &old); err != nil {
		return fmt.Errorf("stored spec of run %q: %w", r.pass, err)
	}
	if old.Source != mine.Source || old.Digest != mine.Digest {
		return usage(fmt.Errorf("--pass: %q is already a run with other rewards or settings; choose another name with --pass", r.pass))
	}
	return nil
}

// serve scores what has no reward yet, and waits until every group has a result. Where
// nobody else does, this process closes the groups.
func (r *rescorer) serve(ctx context.Context, conn *connection, source *sourceRun, stderr io.Writer, log zerolog.Logger) (map[schemas.UID]*schemas.Advantage, error) {
	if err := source.open(ctx, conn.Bus, r.pass); err != nil {
		return nil, err
	}
	have, err := conn.Subjects(ctx, schemas.StreamRewards, schemas.RewardFilter(r.pass, "*", "*"))
	if err != nil {
		return nil, fmt.Errorf("look up rewards of %s: %w", r.pass, err)
	}
	todo := source.samples(have)
	if n := source.size() - len(todo); n > 0 {
		fmt.Fprintf(stderr, "pass %s: %d of %d samples are scored already, resuming\n", r.pass, n, source.size())
	}
	progress := newRescoreProgress(stderr, r.json, r.pass, len(todo))
	defer progress.close()

	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var service errgroup.Group
	service.Go(func() error {
		err := conn.serve(work, func(ctx context.Context) error { return advantage.Run(ctx, r.services.Advantage, conn.Bus, log) })
		if err != nil {
			stop(err)
		}
		return err
	})
	err = reward.Rescore(work, r.services.Reward, conn.Bus, log, reward.Pass{
		Samples: todo, Done: progress.add,
		Change: func(t *schemas.Trajectory) {
			g := source.groups[t.UID]
			t.Run, t.Group = r.pass, g.group
		},
	})
	var advantages map[schemas.UID]*schemas.Advantage
	if err == nil {
		advantages, err = r.advantages(work, conn, source)
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

// advantages waits for those of the pass.
func (r *rescorer) advantages(ctx context.Context, conn *connection, source *sourceRun) (map[schemas.UID]*schemas.Advantage, error) {
	out := map[schemas.UID]*schemas.Advantage{}
	for m, err := range conn.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(r.pass, "*")}, bus.ReadOptions{Live: true}) {
		if err != nil {
			return nil, fmt.Errorf("follow pass %s: %w", r.pass, err)
		}
		a := &schemas.Advantage{}
		if bus.Fits(m, a) != nil {
			continue // the group's result will take its place
		}
		if source.groups[a.UID] != nil {
			out[a.UID] = a
		}
		if len(out) == len(source.groups) {
			return out, nil
		}
	}
	return nil, context.Cause(ctx)
}

// report prints and writes the results and returns the exit status.
func (r *rescorer) report(ctx context.Context, conn *connection, source *sourceRun, advantages map[schemas.UID]*schemas.Advantage, took time.Duration, stdout, stderr io.Writer) error {
	var groups []results.Scored
	for _, uid := range sortedKeys(source.groups) {
		g := source.groups[uid]
		groups = append(groups, results.Scored{UID: uid, Prompt: g.prompt, Before: g.result, After: advantages[uid]})
	}
	p, err := results.CollectPass(ctx, conn.Bus, r.pass, r.run, groups)
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
		err = printPass(stdout, p)
	}
	if err != nil {
		return err
	}
	var statuses []string
	for _, g := range p.Groups {
		statuses = append(statuses, g.Status)
	}
	return notComplete(statuses)
}

// rescoreProgress is a bar on a terminal, a line every few seconds elsewhere.
type rescoreProgress struct {
	out   io.Writer
	pass  schemas.Run
	total int
	bars  *mpb.Progress
	bar   *mpb.Bar

	mu    sync.Mutex
	done  int
	shown time.Time
}

func newRescoreProgress(out io.Writer, machine bool, pass schemas.Run, total int) *rescoreProgress {
	p := &rescoreProgress{out: out, pass: pass, total: total, shown: time.Now()}
	if boot.IsTerminal(out) && !machine {
		p.bars, p.bar = newBar(out, int64(total),
			mpb.PrependDecorators(decor.Name(string(pass)+" ")),
			mpb.AppendDecorators(decor.CountersNoUnit("%d/%d samples"), decor.Name("  "), decor.Elapsed(decor.ET_STYLE_MMSS)))
	}
	return p
}

func (p *rescoreProgress) add() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	if p.bar != nil {
		p.bar.Increment()
	} else if now := time.Now(); now.Sub(p.shown) > 5*time.Second {
		p.shown = now
		fmt.Fprintf(p.out, "pass %s: %d/%d samples\n", p.pass, p.done, p.total)
	}
}

func (p *rescoreProgress) close() {
	if p.bar == nil {
		fmt.Fprintf(p.out, "pass %s: %d/%d samples\n", p.pass, p.done, p.total)
		return
	}
	endBar(p.bars, p.bar, p.done == p.total)
}
