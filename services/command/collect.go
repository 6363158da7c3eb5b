package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// results is what a run printed and wrote, in the shape of --json.
type results struct {
	Groups  []*groupResult
	Summary summary
}

type groupResult struct {
	UID    string `json:"uid"`
	Prompt string `json:"prompt"`
	Status string `json:"status"`
	// Group is the uid of the group that stood in for the prompt's own, where one did.
	Group   string         `json:"group,omitempty"`
	Error   string         `json:"error,omitempty"`
	Mean    *float64       `json:"mean"`
	Std     *float64       `json:"std"`
	Members []memberResult `json:"members"`
}

type memberResult struct {
	SampleIndex int64    `json:"sample_index"`
	Status      string   `json:"status"`
	Error       string   `json:"error,omitempty"`
	Reward      *float64 `json:"reward"`
	Advantage   *float64 `json:"advantage"`
	// StepAdvantages are there when they differ over the trained steps.
	StepAdvantages []float64     `json:"step_advantages,omitempty"`
	Scores         []scoreResult `json:"scores,omitempty"`
	LogProbs       []*float64    `json:"log_probs"`
	Transitions    []string      `json:"transitions"`
	Latents        []int64       `json:"latent_step_indices"`
	Seed           uint64        `json:"sample_seed,string"`
	Digest         string        `json:"content_digest"`
	Image          string        `json:"image,omitempty"`
	trajectory     *schemas.Trajectory
}

// scoreResult is the outcome of one reward function.
type scoreResult struct {
	Name    string   `json:"name"`
	Version string   `json:"version,omitempty"`
	Status  string   `json:"status"`
	Value   *float64 `json:"value"`
	Error   string   `json:"error,omitempty"`
	Detail  string   `json:"detail,omitempty"`
	Seconds float64  `json:"seconds"`
}

type summary struct {
	Run          string  `json:"run"`
	Groups       int     `json:"groups"`
	Complete     int     `json:"complete"`
	Refused      int     `json:"refused"`
	Refills      int     `json:"refills,omitempty"`
	Samples      int     `json:"samples"`
	Trajectories int     `json:"trajectories"`
	StepsStored  int     `json:"steps_stored"`
	Digest       string  `json:"digest"`
	Seconds      float64 `json:"seconds"`
	// Metrics are named as verl names them; those of evaluations begin with val-.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	Out     string             `json:"out,omitempty"`
	Sheet   string             `json:"sheet,omitempty"`
}

// collect reads what the run stored. The digest is over the content of all
// trajectories and advantages in key order: equal for equal seeds and prompts,
// however the work was packed, timed or repeated.
func collect(ctx context.Context, b *bus.Bus, run string, prompts []prompt, o *outcome) (*results, error) {
	trajectories := map[string]*schemas.Trajectory{}
	for t, err := range storedTrajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		trajectories[memberKey(t.UID, t.SampleIndex)] = t.Trajectory
	}
	steps, err := countSteps(ctx, b, run)
	if err != nil {
		return nil, err
	}
	rewards, err := readRewards(ctx, b, run, "*")
	if err != nil {
		return nil, err
	}
	r := &results{Summary: summary{
		Run: run, Groups: len(prompts), Refused: len(o.refused), Refills: o.refills, Trajectories: len(trajectories), StepsStored: steps,
	}}
	var measured measures
	contents := map[string][32]byte{}
	for _, p := range prompts {
		g := &groupResult{UID: p.uid, Prompt: p.text, Members: []memberResult{}}
		r.Groups = append(r.Groups, g)
		a := o.advantages[p.uid]
		if a == nil {
			g.Status, g.Error = "refused", o.refused[p.uid].Reason
			continue
		}
		if contents["advantage."+a.UID], err = schemas.ContentDigest(a); err != nil {
			return nil, fmt.Errorf("advantage of %s: %w", a.UID, err)
		}
		g.Status, g.Error, g.Mean, g.Std = a.Status, a.Error, a.Mean, a.Std
		if a.UID != p.uid {
			g.Group = a.UID
		}
		for _, m := range a.Members {
			member := memberResult{SampleIndex: m.SampleIndex, Status: m.Status, Reward: m.Reward, Advantage: m.Advantage, StepAdvantages: m.StepAdvantages}
			if reward := rewards[memberKey(a.UID, m.SampleIndex)]; reward != nil {
				member.take(reward)
				measured.sample(a, &m, reward)
			}
			if t := trajectories[memberKey(a.UID, m.SampleIndex)]; t != nil {
				key := memberKey(t.UID, t.SampleIndex)
				if contents["trajectory."+key], err = schemas.ContentDigest(t); err != nil {
					return nil, fmt.Errorf("trajectory %s: %w", key, err)
				}
				member.trajectory, member.LogProbs, member.Seed = t, t.LogProbs, t.SampleSeed
				if t.Error != "" {
					member.Error = t.Error
				}
				member.Transitions, member.Latents, member.Digest = t.Transitions, t.LatentStepIndices, t.ContentDigest
			}
			g.Members = append(g.Members, member)
		}
		measured.group(a, rewards)
		r.Summary.Samples += len(g.Members)
		if g.Status == "complete" {
			r.Summary.Complete++
		}
	}
	r.Summary.Metrics = measured.metrics()
	r.Summary.Digest = digestOf(contents)
	return r, nil
}

// digestOf is over contents in key order.
func digestOf(contents map[string][32]byte) string {
	h := sha256.New()
	for _, key := range sortedKeys(contents) {
		digest := contents[key]
		fmt.Fprintf(h, "%s\x00", key)
		h.Write(digest[:])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// memberKey sorts like the pair (uid, sample index).
func memberKey(uid string, sample int64) string { return fmt.Sprintf("%s.%06d", uid, sample) }

// countSteps counts step events, not their parts, of all attempts.
func countSteps(ctx context.Context, b *bus.Bus, run string) (int, error) {
	subjects, err := b.Subjects(ctx, schemas.StreamSteps, schemas.Prefix+"step."+run+".*.*.*.*")
	return len(subjects), err
}

func (r *results) printJSON(w io.Writer) error { return printJSONLines(w, r.Groups, r.Summary) }

// printJSONLines prints one object per group and last the summary.
func printJSONLines[G, S any](w io.Writer, groups []G, summary S) error {
	enc := json.NewEncoder(w)
	for _, g := range groups {
		if err := enc.Encode(g); err != nil {
			return err
		}
	}
	return enc.Encode(map[string]any{"summary": summary})
}

// writeResults makes the file dir/results.jsonl.
func writeResults(dir string, print func(io.Writer) error) error {
	f, err := os.Create(filepath.Join(dir, "results.jsonl"))
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := print(f); err != nil {
		f.Close()
		return fmt.Errorf("write results: %w", err)
	}
	return f.Close()
}

// write makes dir: the pictures, a contact sheet per group, results.jsonl.
func (r *results) write(ctx context.Context, b *bus.Bus, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	r.Summary.Out = dir
	for _, g := range r.Groups {
		var tiles []tile
		for i := range g.Members {
			m := &g.Members[i]
			if m.trajectory == nil || m.trajectory.Image == nil {
				continue
			}
			data, err := client.New(b).Image(ctx, m.trajectory)
			if err != nil {
				return fmt.Errorf("picture of %s sample %d: %w", g.UID, m.SampleIndex, err)
			}
			m.Image = filepath.Join(dir, fmt.Sprintf("%s-%03d.png", g.UID, m.SampleIndex))
			if err := os.WriteFile(m.Image, data, 0o644); err != nil {
				return fmt.Errorf("write picture: %w", err)
			}
			tiles = append(tiles, tile{png: data, sample: m.SampleIndex, reward: m.Reward, advantage: m.Advantage, detail: m.detail()})
		}
		if len(tiles) == 0 {
			continue
		}
		sheet := filepath.Join(dir, g.UID+"-sheet.png")
		if err := writeSheet(sheet, g.Prompt, tiles); err != nil {
			return err
		}
		if r.Summary.Sheet == "" {
			r.Summary.Sheet = sheet
		}
	}
	return writeResults(dir, r.printJSON)
}

func number(v *float64, format string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf(format, *v)
}

func firstLine(s string) string {
	lines := slices.Collect(strings.SplitSeq(s, "\n"))
	if len(lines) > 1 {
		return lines[0] + " ..."
	}
	return s
}
