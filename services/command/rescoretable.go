package command

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// passResults is what a pass printed and wrote, in the shape of --json.
type passResults struct {
	Groups  []*passGroup
	Summary passSummary
}

type passGroup struct {
	UID    string   `json:"uid"`
	Prompt string   `json:"prompt"`
	Status string   `json:"status"`
	Error  string   `json:"error,omitempty"`
	Mean   *float64 `json:"mean"`
	Std    *float64 `json:"std"`
	// SourceMean and SourceStd are those of the run; null where it has no result.
	SourceMean *float64     `json:"source_mean"`
	SourceStd  *float64     `json:"source_std"`
	Members    []passMember `json:"members"`
}

type passMember struct {
	SampleIndex     int64         `json:"sample_index"`
	Status          string        `json:"status"`
	Error           string        `json:"error,omitempty"`
	Reward          *float64      `json:"reward"`
	Advantage       *float64      `json:"advantage"`
	StepAdvantages  []float64     `json:"step_advantages,omitempty"`
	Scores          []scoreResult `json:"scores"`
	read            string
	SourceStatus    string   `json:"source_status"`
	SourceReward    *float64 `json:"source_reward"`
	SourceAdvantage *float64 `json:"source_advantage"`
}

type passSummary struct {
	Run      string  `json:"run"`
	Source   string  `json:"source_run"`
	Groups   int     `json:"groups"`
	Complete int     `json:"complete"`
	Samples  int     `json:"samples"`
	Scored   int     `json:"scored"`
	Digest   string  `json:"digest"`
	Seconds  float64 `json:"seconds"`
	Out      string  `json:"out,omitempty"`
}

// collect joins the results of the pass with those of its run.
func (r *rescorer) collect(ctx context.Context, b *bus.Bus, source *sourceRun, advantages map[string]*schemas.Advantage) (*passResults, error) {
	rewards, err := readRewards(ctx, b, r.pass, "*")
	if err != nil {
		return nil, err
	}
	out := &passResults{Summary: passSummary{Run: r.pass, Source: r.run, Groups: len(source.groups)}}
	contents := map[string][32]byte{}
	for _, uid := range sortedKeys(source.groups) {
		from, a := source.groups[uid], advantages[uid]
		if contents["advantage."+uid], err = schemas.ContentDigest(a); err != nil {
			return nil, fmt.Errorf("advantage of %s: %w", uid, err)
		}
		g := &passGroup{UID: uid, Prompt: from.prompt, Status: a.Status, Error: a.Error, Mean: a.Mean, Std: a.Std, Members: []passMember{}}
		before := map[int64]schemas.Member{}
		if from.result != nil {
			g.SourceMean, g.SourceStd = from.result.Mean, from.result.Std
			for _, m := range from.result.Members {
				before[m.SampleIndex] = m
			}
		}
		for _, m := range a.Members {
			var scores memberResult
			if r := rewards[memberKey(uid, m.SampleIndex)]; r != nil {
				scores.take(r)
			}
			old := before[m.SampleIndex]
			x := passMember{
				SampleIndex: m.SampleIndex, Status: m.Status, Error: scores.Error, Reward: m.Reward, Advantage: m.Advantage,
				StepAdvantages: m.StepAdvantages, Scores: scores.Scores, read: scores.detail(),
				SourceStatus: old.Status, SourceReward: old.Reward, SourceAdvantage: old.Advantage,
			}
			if m.Status == schemas.StatusScored {
				out.Summary.Scored++
			}
			g.Members = append(g.Members, x)
		}
		out.Summary.Samples += len(g.Members)
		if a.Status == schemas.StatusComplete {
			out.Summary.Complete++
		}
		out.Groups = append(out.Groups, g)
	}
	out.Summary.Digest = digestOf(contents)
	return out, nil
}

func (p *passResults) printJSON(w io.Writer) error { return printJSONLines(w, p.Groups, p.Summary) }

// print is the table for people: the run before, the pass after.
func (p *passResults) print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	if len(p.Groups) <= fewGroups {
		fmt.Fprintln(t, "GROUP\tSAMPLE\tREAD\tREWARD\tNOW\tADVANTAGE\tNOW")
		for _, g := range p.Groups {
			for _, m := range g.Members {
				after := m.Status
				if m.Reward != nil {
					after = number(m.Reward, "%.3f")
				}
				fmt.Fprintf(t, "%s\t#%d\t%s\t%s\t%s\t%s\t%s\n", g.UID, m.SampleIndex, m.read,
					number(m.SourceReward, "%.3f"), after, number(m.SourceAdvantage, "%+.3f"), number(m.Advantage, "%+.3f"))
			}
		}
	} else {
		fmt.Fprintln(t, "GROUP\tSTATUS\tMEAN\tNOW\tSTD\tNOW")
		for _, g := range p.Groups {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", g.UID, g.Status, number(g.SourceMean, "%.3f"), number(g.Mean, "%.3f"), number(g.SourceStd, "%.3f"), number(g.Std, "%.3f"))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	s := p.Summary
	fmt.Fprintf(w, "\npass %s over run %s: %d of %d groups complete, %d of %d samples scored, %.1f s\ndigest %s\n",
		s.Run, s.Source, s.Complete, s.Groups, s.Scored, s.Samples, s.Seconds, s.Digest)
	for _, line := range p.faults() {
		fmt.Fprintln(w, line)
	}
	if s.Out != "" {
		fmt.Fprintf(w, "results %s\n", filepath.Join(s.Out, "results.jsonl"))
	}
	return nil
}

// faults says what went wrong, each text once.
func (p *passResults) faults() []string {
	counts := map[string]int{}
	for _, g := range p.Groups {
		for _, m := range g.Members {
			if m.Status != schemas.StatusScored && m.Error != "" {
				counts[firstLine(m.Error)]++
			}
		}
	}
	const most = 5
	var out []string
	for _, text := range sortedKeys(counts) {
		if len(out) == most {
			return append(out, fmt.Sprintf("and %d others", len(counts)-most))
		}
		out = append(out, fmt.Sprintf("%s failed: %s", count(counts[text], "sample"), strings.TrimSpace(text)))
	}
	return out
}
