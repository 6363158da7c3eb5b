package command

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// readRewards returns the rewards of a run, or of one group of it (uid "*": of all), by
// memberKey.
func readRewards(ctx context.Context, b *bus.Bus, run, uid string) (map[string]*schemas.Reward, error) {
	out := map[string]*schemas.Reward{}
	for m, err := range b.Read(ctx, schemas.StreamRewards, []string{bus.RewardFilter(run, "*", uid)}, bus.ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("read rewards: %w", err)
		}
		var r schemas.Reward
		if bus.Fits(m, &r) != nil {
			continue // its sample's reward will take its place
		}
		out[memberKey(r.UID, r.SampleIndex)] = &r
	}
	return out, nil
}

// take puts the scores of a sample into its result.
func (m *memberResult) take(r *schemas.Reward) {
	m.Error = r.Error
	for _, s := range r.Scores {
		m.Scores = append(m.Scores, scoreResult{
			Name: s.Name, Version: s.Version, Status: s.Status, Value: s.Value, Error: s.Error, Detail: s.Detail,
			Seconds: float64(s.DurationNS) / 1e9,
		})
	}
}

// measures gather the metrics of a run over all of its groups, as Batch events have them
// for each batch.
type measures struct {
	stats           estimator.BatchStats
	began, finished int64
	evaluation      []estimator.ValidationGroup
}

func (x *measures) sample(a *schemas.Advantage, m *schemas.Member, r *schemas.Reward) {
	if r.Reward == nil || a.Evaluation || a.Status != schemas.StatusComplete && a.Status != schemas.StatusPartial {
		return
	}
	s := estimator.SampleStats{
		UID: a.UID, Reward: *r.Reward, Advantage: m.Advantage, StepAdvantages: m.StepAdvantages, PolicyMin: r.PolicyVersionMin, PolicyMax: r.PolicyVersionMax, GenerateSeconds: -1,
	}
	for _, score := range r.Scores {
		s.ScoreSeconds += float64(score.DurationNS) / 1e9
		if score.Value != nil {
			s.Scores = append(s.Scores, estimator.Metric{Name: score.Name, Value: *score.Value})
		}
	}
	if r.SampleFinished > 0 {
		s.GenerateSeconds = float64(r.SampleFinished-r.SampleStarted) / 1e9
		if x.began == 0 || r.SampleStarted < x.began {
			x.began = r.SampleStarted
		}
		x.finished = max(x.finished, r.SampleFinished)
	}
	x.stats.Samples = append(x.stats.Samples, s)
}

// group takes the groups of evaluations.
func (x *measures) group(a *schemas.Advantage, rewards map[string]*schemas.Reward) {
	if !a.Evaluation {
		return
	}
	g := estimator.ValidationGroup{Source: "unknown", Variables: []estimator.Variable{{Name: "reward"}}}
	if fields, err := a.Metadata.Map(); err == nil {
		if s, ok := fields["data_source"].(string); ok && s != "" {
			g.Source = s
		}
	}
	at := map[string]int{}
	reader := "" // the reward function whose readings are the answers to vote on
	for i := range a.Members {
		r := rewards[memberKey(a.UID, a.Members[i].SampleIndex)]
		if r == nil || r.Reward == nil {
			continue
		}
		g.Variables[0].Values = append(g.Variables[0].Values, *r.Reward)
		g.Answers = append(g.Answers, "")
		for _, s := range r.Scores {
			if s.Value == nil {
				continue
			}
			if reader == "" && s.Detail != "" {
				reader = s.Name
			}
			if s.Name == reader {
				g.Answers[len(g.Answers)-1] = s.Detail
			}
			k, ok := at[s.Name]
			if !ok {
				k = len(g.Variables)
				at[s.Name] = k
				g.Variables = append(g.Variables, estimator.Variable{Name: s.Name})
			}
			g.Variables[k].Values = append(g.Variables[k].Values, *s.Value)
		}
	}
	if reader == "" {
		g.Answers = nil
	}
	x.evaluation = append(x.evaluation, g)
}

func (x *measures) metrics() map[string]float64 {
	if x.finished > 0 {
		x.stats.GenerateSeconds = float64(x.finished-x.began) / 1e9
	}
	out := map[string]float64{}
	for _, m := range append(estimator.Metrics(x.stats), estimator.Validation(x.evaluation)...) {
		out[m.Name] = m.Value
	}
	return out
}

// measures are the lines of the summary that say how the rewards are.
func (s *summary) measures() []string {
	var lines []string
	m := s.Metrics
	if _, ok := m["critic/rewards/mean"]; ok {
		line := fmt.Sprintf("reward %.3f (%.3f to %.3f), std in a group %.3f, %.0f %% of groups without variance",
			m["critic/rewards/mean"], m["critic/rewards/min"], m["critic/rewards/max"], m["critic/rewards/std_mean"], 100*m["critic/rewards/zero_std_ratio"])
		if s.Refills > 0 {
			line += fmt.Sprintf(", %d groups refilled", s.Refills)
		}
		lines = append(lines, line)
	}
	evaluations := map[string][]string{} // by source and score
	for _, name := range slices.Sorted(maps.Keys(m)) {
		rest, core := strings.CutPrefix(name, "val-core/")
		rest = strings.TrimSuffix(rest, "/mean")
		if at := strings.LastIndexByte(rest, '/'); core && !strings.HasSuffix(rest, "/std") {
			evaluations[rest[:at]] = append(evaluations[rest[:at]], fmt.Sprintf("%s %.3f", rest[at+1:], m[name]))
		}
	}
	for _, of := range slices.Sorted(maps.Keys(evaluations)) {
		lines = append(lines, "evaluation "+of+": "+strings.Join(evaluations[of], ", "))
	}
	return lines
}
