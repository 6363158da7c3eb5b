package results

import (
	"context"
	"io"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// Pass is the result of scoring a run's samples again, beside the run's own. Its JSON is that of meander rescore
// --json.
type Pass struct {
	Groups  []*PassGroup
	Summary PassSummary
}

// PassGroup is a group of a pass.
type PassGroup struct {
	view.GroupResult
	// SourceMean and SourceStd are the run's; null where the run has no result.
	SourceMean *float64     `json:"source_mean"`
	SourceStd  *float64     `json:"source_std"`
	Members    []PassMember `json:"members"`
}

// PassMember is one sample of a PassGroup.
type PassMember struct {
	view.SampleResult
	Scores          []view.Score `json:"scores"`
	SourceStatus    string       `json:"source_status"`
	SourceReward    *float64     `json:"source_reward"`
	SourceAdvantage *float64     `json:"source_advantage"`
}

// PassSummary counts the results of a pass.
type PassSummary struct {
	Run      schemas.Run `json:"run"`
	Source   schemas.Run `json:"source_run"`
	Groups   int         `json:"groups"`
	Complete int         `json:"complete"`
	Samples  int         `json:"samples"`
	Scored   int         `json:"scored"`
	Digest   string      `json:"digest"`
	Seconds  float64     `json:"seconds"`
	Out      string      `json:"out,omitempty"`
}

// ScoredAgain is a group before and after a pass.
type ScoredAgain struct {
	UID    schemas.UID
	Prompt string
	// Before is the result in the run, nil if there is none; After is the result in the pass.
	Before, After *schemas.Advantage
}

// CollectPass reads the rewards that a pass stored for the groups of a run, and joins them with the results of the
// groups before and after the pass. It fails if the server cannot be read.
func CollectPass(ctx context.Context, b *bus.Bus, pass, run schemas.Run, groups []ScoredAgain) (*Pass, error) {
	rewards, err := view.Rewards(ctx, b, pass, "*")
	if err != nil {
		return nil, err
	}
	out := &Pass{Summary: PassSummary{Run: pass, Source: run, Groups: len(groups)}}
	var content digest
	for _, s := range groups {
		if err := content.add("advantage."+string(s.UID), s.After); err != nil {
			return nil, err
		}
		g := s.compare(rewards)
		for _, m := range g.Members {
			if m.Status == schemas.StatusScored {
				out.Summary.Scored++
			}
		}
		out.Summary.Samples += len(g.Members)
		if g.Status == schemas.StatusComplete {
			out.Summary.Complete++
		}
		out.Groups = append(out.Groups, g)
	}
	out.Summary.Digest = content.String()
	return out, nil
}

// compare joins the results of a group before and after the pass, sample by sample. rewards are those of the pass.
func (s *ScoredAgain) compare(rewards map[view.Key]*schemas.Reward) *PassGroup {
	a := s.After
	g := &PassGroup{GroupResult: view.GroupResultOf(a, s.UID, s.Prompt), Members: []PassMember{}}
	before := map[int64]schemas.Member{}
	if s.Before != nil {
		g.SourceMean, g.SourceStd = s.Before.Mean, s.Before.Std
		for _, m := range s.Before.Members {
			before[m.SampleIndex] = m
		}
	}
	for _, m := range a.Members {
		old := before[m.SampleIndex]
		now := view.MemberOf(&m, nil, rewards[view.Key{UID: s.UID, Index: m.SampleIndex}])
		g.Members = append(g.Members, PassMember{
			SampleResult: now.SampleResult, Scores: now.Scores,
			SourceStatus: old.Status, SourceReward: old.Reward, SourceAdvantage: old.Advantage,
		})
	}
	return g
}

// WriteJSON writes one JSON object per line: each group, then the summary as the value of summary.
func (p *Pass) WriteJSON(w io.Writer) error { return writeLines(w, p.Groups, p.Summary) }

// Write makes the file dir/results.jsonl, and notes the folder in p.
func (p *Pass) Write(dir string) error {
	if err := makeFolder(dir); err != nil {
		return err
	}
	p.Summary.Out = dir
	return writeFile(dir, p.WriteJSON)
}
