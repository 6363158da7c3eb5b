// Package prove walks from weights back to the prompts that they were learned from, over an exported archive alone, and
// computes links of this chain again:
//
//	weights <- update <- batch <- trajectories <- rewards and advantages <- requests <- prompts
//
// A Link is one of these facts with what came of it. Run checks the archive byte by byte (archive.go), finds the update
// that made the weights and those before it (walk.go), and computes samples, rewards, advantages and requests again
// with the services that made them (again.go), in a store of their own. Updates are made again by the trainer
// (trainer.go).
package prove

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/verify"
)

// Verdicts of links. A link that holds was computed again and is the same; one that is broken is not; one that is
// unchecked cannot be computed here, and one that is left out was not asked for.
const (
	Holds     = "holds"
	Broken    = "broken"
	Unchecked = "unchecked"
	LeftOut   = "left out"
)

// Link is one fact of the chain.
type Link struct {
	// Link is what is held to something: one of Links.
	Link string `json:"link"`
	// Of names the version, update, batch or group; empty: the whole archive.
	Of      string `json:"of,omitempty"`
	Verdict string `json:"verdict"`
	// What was compared, with numbers; of a link that does not hold why.
	What string `json:"what"`
}

// The links, in the order in which they are walked.
const (
	LinkArchive      = "archive"
	LinkWeights      = "weights"
	LinkChain        = "chain"
	LinkBatch        = "batch"
	LinkTrajectories = "trajectories"
	LinkSums         = "sums"
	LinkRatings      = "ratings"
	LinkSelections   = "selections"
	LinkRewards      = "rewards"
	LinkAdvantages   = "advantages"
	LinkPrompts      = "prompts"
	LinkUpdate       = "update"
)

// Links returns the names of all links, in order.
func Links() []string {
	return []string{
		LinkArchive, LinkWeights, LinkChain, LinkBatch, LinkSums, LinkRatings, LinkSelections, LinkTrajectories,
		LinkRewards, LinkAdvantages, LinkPrompts, LinkUpdate,
	}
}

// Options choose the weights, and how much is computed again.
type Options struct {
	// Adapter is a file or folder of an adapter; empty: the weights of Version, -1: of the newest update.
	Adapter string
	Version int64
	// Tenant and Lane are whose weights are meant; empty: for a Version the only ones that have updates in the archive.
	Tenant schemas.Tenant
	Lane   schemas.Lane
	// Samples is how many samples of a batch are computed again, in whole groups; All: all, of all updates back to the
	// checkpoint.
	Samples int
	All     bool
	// Only are the links that are asked for; empty: all that this program computes, and updates where there is a
	// Trainer.
	Only []string
	// Verify says with what models trajectories are computed again; Tolerance is that of its report, and how far, as a
	// share of its length, an update may be off that a trainer makes again.
	Verify    verify.Options
	Tolerance float64
	Reward    reward.Config
	Advantage advantage.Config
	// Trainer is the command that makes an update again, with its arguments: it is called with --replay FILE@K --json.
	Trainer []string
	Log     zerolog.Logger
}

// Report is what became of the links.
type Report struct {
	Run     schemas.Run `json:"run,omitempty"`
	Archive string      `json:"archive,omitempty"` // its SHA-256
	Weights string      `json:"weights,omitempty"` // their digest
	Links   []Link      `json:"links"`
	Proved  bool        `json:"proved"`
}

// Faults returns why nothing is proved, a line for each verdict that is none of those of a proof; none if it is.
func (r *Report) Faults() (out []string) {
	for _, v := range []string{Broken, Unchecked} {
		if n := r.Count(v); n > 0 {
			out = append(out, fmt.Sprintf("%s: %d of %d links", v, n, len(r.Links)))
		}
	}
	return out
}

// Count counts the links with a verdict.
func (r *Report) Count(verdict string) (n int) {
	for _, l := range r.Links {
		if l.Verdict == verdict {
			n++
		}
	}
	return n
}

// prover is one walk.
type prover struct {
	options Options
	bus     *bus.Bus // of a store of its own
	archive *archive
	report  Report
	judge   *reward.Judge // of samples in the middle; nil until one is judged again
}

// Run proves weights by an archive, whose file the name is for the trainer. b is of an empty store with streams, which
// no other service works on. The report says what does not hold. An error is of the server, of ctx, or of what was
// asked for (a SettingError).
func Run(ctx context.Context, b *bus.Bus, name string, file io.ReadSeeker, o Options) (*Report, error) {
	p := &prover{options: o, bus: b, report: Report{Links: []Link{}}}
	err := p.walk(ctx, name, file)
	if p.judge != nil {
		p.judge.Close()
	}
	p.report.Proved = err == nil && len(p.report.Faults()) == 0
	return &p.report, err
}

// SettingError says that what was asked for cannot be.
type SettingError struct{ Err error }

func (e *SettingError) Error() string { return e.Err.Error() }
func (e *SettingError) Unwrap() error { return e.Err }

// add adds a link to the report.
func (p *prover) add(link, of, verdict, format string, args ...any) {
	p.report.Links = append(p.report.Links, Link{link, of, verdict, fmt.Sprintf(format, args...)})
}

// asked reports whether a link is asked for, and adds it as left out if it is not.
func (p *prover) asked(link, of string) bool {
	only := p.options.Only
	if len(only) > 0 && !slices.Contains(only, link) {
		p.add(link, of, LeftOut, "not asked for")
		return false
	}
	return true
}

// walk adds the links, one after the other.
func (p *prover) walk(ctx context.Context, name string, file io.ReadSeeker) error {
	if !p.readArchive(file) {
		return nil
	}
	update, err := p.findUpdate()
	if update == nil || err != nil {
		return err
	}
	updates := p.chain(update)
	if !p.options.All {
		updates = updates[:1]
	}
	if err := p.importArchive(ctx, file); err != nil {
		return err
	}
	for i, u := range updates {
		if i > 0 {
			p.checkMade(u)
		}
		of := nameOf(u)
		groups := p.checkBatch(u, of)
		p.checkSums(u, of)
		p.checkRatings(u, of)
		p.checkSelections(groups, of)
		if len(groups) == 0 {
			continue
		}
		if err := p.again(ctx, p.choose(groups), of); err != nil {
			return err
		}
		if err := p.replay(ctx, name, u, of); err != nil {
			return err
		}
	}
	return ctx.Err()
}
