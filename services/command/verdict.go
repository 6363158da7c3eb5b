package command

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// judgement is a verdict as people write it: a line of a file, or UID SAMPLE=VALUE.
type judgement struct {
	UID         schemas.UID `json:"uid"`
	SampleIndex *int64      `json:"sample_index"`
	Value       *float64    `json:"value"`
	Name        string      `json:"name"`
	Error       string      `json:"error"`
	Comment     string      `json:"comment"`
	Author      string      `json:"author"`
}

func verdictCommand(a *app) *cobra.Command {
	var run schemas.Run
	var name, file, dir, author string
	c := &cobra.Command{
		Use:   "verdict [UID SAMPLE=VALUE ...]",
		Short: "give samples the reward that they wait for (--reward external)",
		Long: `verdict is for rewards that people or batch jobs give. Without arguments it lists the
samples of a run that wait for one, and with --out writes their images, to look at.
With a uid and values, or with a file of them, it gives the verdicts; the group closes
when its last one is there, or at its deadline without.

A file has one JSON object a line: {"uid": "...", "sample_index": 0, "value": 0.8}, with
"name" for external:NAME, "comment" and "author" if you like. A line with "error" and no
value says that there will be none. The first verdict of a sample counts.`,
		Example: `  meander up &
  meander publish --run demo --reward external 'a red sign that says "OPEN"'
  meander verdict --run demo --out images
  meander verdict --run demo p1 0=0.8 1=0.25    # p1 is the uid that it lists
  meander verdict --run demo --file verdicts.jsonl`,
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, given []string) error {
			var list []judgement
			var err error
			switch {
			case file != "" && len(given) > 0:
				return usage(errors.New("give values on the command line or in --file, not both"))
			case file != "":
				list, err = readJudgements(file, c.InOrStdin())
			case len(given) > 0:
				list, err = parseJudgements(given)
			default:
				return a.showWaiting(c.Context(), conn.Bus, run, dir, c.OutOrStdout(), c.ErrOrStderr())
			}
			if err != nil {
				return usage(err)
			}
			for i := range list {
				list[i].Name, list[i].Author = cmp.Or(list[i].Name, name), cmp.Or(list[i].Author, author)
			}
			if err := give(c.Context(), conn.Bus, run, list); err != nil {
				return err
			}
			fmt.Fprintf(c.ErrOrStderr(), "%s given; the groups: meander show --run %s\n", count(len(list), "verdict"), run)
			return nil
		}),
	}
	f := c.Flags()
	f.StringVar((*string)(&run), "run", "", "run; default the latest")
	f.StringVar(&name, "name", "", "NAME of external:NAME; needed where a sample waits for several")
	f.StringVarP(&file, "file", "f", "", "JSON lines of verdicts; - for stdin")
	f.StringVar(&author, "author", "", "who judges")
	f.StringVar(&dir, "out", "", "folder to write the images of what waits into")
	return c
}

// give publishes verdicts in their order.
func give(ctx context.Context, b *bus.Bus, run schemas.Run, list []judgement) error {
	for i, j := range list {
		v, err := j.verdict(ctx, b, run)
		if err == nil {
			err = client.New(b).Verdict(ctx, v)
		}
		if err != nil {
			return fmt.Errorf("%s sample %d: %w; %d of %d verdicts are given", j.UID, *j.SampleIndex, err, i, len(list))
		}
	}
	return nil
}

// parseJudgements reads UID SAMPLE=VALUE ...
func parseJudgements(given []string) ([]judgement, error) {
	if err := schemas.CheckToken("uid", given[0]); err != nil {
		return nil, err
	}
	if len(given) == 1 {
		return nil, fmt.Errorf("no values for %s; must be SAMPLE=VALUE, such as 0=0.8", given[0])
	}
	var out []judgement
	for _, s := range given[1:] {
		left, right, _ := strings.Cut(s, "=")
		sample, err1 := strconv.ParseInt(left, 10, 64)
		value, err2 := strconv.ParseFloat(right, 64)
		if err := errors.Join(err1, err2); err != nil || math.IsNaN(value) || math.IsInf(value, 0) {
			return nil, fmt.Errorf("%q; must be SAMPLE=VALUE, such as 0=0.8, and a finite value", s)
		}
		out = append(out, judgement{UID: schemas.UID(given[0]), SampleIndex: &sample, Value: &value})
	}
	return out, nil
}

// maxJudgements bounds a file of verdicts, in lines.
const maxJudgements = 1 << 20

// readJudgements reads JSON lines.
func readJudgements(file string, stdin io.Reader) ([]judgement, error) {
	in := stdin
	if file != "-" {
		f, done, err := openInput(file)
		if err != nil {
			return nil, err
		}
		defer done()
		in = f
	}
	var out []judgement
	lines := bufio.NewScanner(in)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var j judgement
		d := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		d.DisallowUnknownFields()
		err := d.Decode(&j)
		switch {
		case err == nil && j.UID == "":
			err = errors.New("uid is missing")
		case err == nil && j.SampleIndex == nil:
			err = errors.New("sample_index is missing")
		case err == nil && (j.Value == nil) == (j.Error == ""):
			err = errors.New("must be a value, or an error that says why there is none")
		case err == nil && len(out) == maxJudgements:
			err = fmt.Errorf("more than %d verdicts", maxJudgements)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", file, n, err)
		}
		out = append(out, j)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: no verdicts in it; must be JSON lines such as "+
			`{"uid": "p1", "sample_index": 0, "value": 0.8}`, file)
	}
	return out, nil
}

// verdict checks that there is such a sample and that it wants it.
func (j judgement) verdict(ctx context.Context, b *bus.Bus, run schemas.Run) (*schemas.Verdict, error) {
	t, err := client.New(b).Trajectory(ctx, run, j.UID, *j.SampleIndex)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, fmt.Errorf("run %q has no such sample, or it is not finished; 'meander verdict --run %s' lists what waits", run, run)
	}
	if err != nil {
		return nil, err
	}
	names := externals(&t.Group)
	switch {
	case len(names) == 0:
		return nil, errors.New("it has no external reward function")
	case j.Name == "" && len(names) > 1:
		return nil, fmt.Errorf("it waits for %s; say which with --name", strings.Join(names, " and "))
	case j.Name == "":
		j.Name = names[0]
	}
	for _, name := range names {
		if name == j.Name {
			return &schemas.Verdict{
				Run: run, UID: j.UID, SampleIndex: *j.SampleIndex, Name: j.Name, Value: j.Value,
				Error: j.Error, Comment: j.Comment, Author: j.Author, At: time.Now().UnixNano(),
			}, nil
		}
	}
	return nil, fmt.Errorf("name %q; it waits for %s", j.Name, strings.Join(names, " and "))
}

// externals are the names of the verdicts that samples of a group wait for.
func externals(g *schemas.Group) []string {
	var out []string
	for _, r := range g.Reward {
		if name := scorer.VerdictName(r.Name); name != "" {
			out = append(out, name)
		}
	}
	return out
}

// waitingSample is a sample that lacks a verdict.
type waitingSample struct {
	UID         schemas.UID `json:"uid"`
	SampleIndex int64       `json:"sample_index"`
	Name        string      `json:"name"`
	Prompt      string      `json:"prompt"`
	// Deadline is when the group closes without it, Unix nanoseconds; 0: the service decides.
	Deadline int64  `json:"deadline"`
	Image    string `json:"image,omitempty"`
}

func (a *app) showWaiting(ctx context.Context, b *bus.Bus, run schemas.Run, dir string, out, stderr io.Writer) error {
	waiting, err := waitingIn(ctx, b, run, dir)
	if err != nil {
		return err
	}
	if a.json {
		lines := json.NewEncoder(out)
		for _, w := range waiting {
			if err := lines.Encode(w); err != nil {
				return err
			}
		}
		return nil
	}
	if len(waiting) == 0 {
		fmt.Fprintf(stderr, "no finished sample of run %s waits for a verdict\n", run)
		return nil
	}
	t := newColumns(out)
	fmt.Fprintf(t, "run %s\nUID\tSAMPLE\tNAME\tUNTIL\tPROMPT\n", run)
	for _, w := range waiting {
		until := "-"
		if w.Deadline > 0 {
			until = time.Unix(0, w.Deadline).Local().Format(time.DateTime)
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\n", w.UID, w.SampleIndex, w.Name, until, shorten(w.Prompt, 60))
	}
	return t.Flush()
}

// waitingIn finds the verdicts that finished samples of a run wait for, sorted. With a folder
// it writes their images there.
func waitingIn(ctx context.Context, b *bus.Bus, run schemas.Run, dir string) ([]waitingSample, error) {
	rewards, err := results.Rewards(ctx, b, run, "*")
	if err != nil {
		return nil, err
	}
	if dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("--out: %w", err)
		}
	}
	var waiting []waitingSample
	for t, err := range results.Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		if rewards[results.Sample{UID: t.UID, Index: t.SampleIndex}] != nil || t.StopReason != schemas.StopCompleted {
			continue
		}
		for _, name := range externals(&t.Group) {
			m, err := b.Last(ctx, schemas.StreamVerdicts, schemas.VerdictSubject(run, t.UID, t.SampleIndex, name))
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				return nil, fmt.Errorf("look up verdict: %w", err)
			}
			if err == nil && bus.Fits(m, &schemas.Verdict{}) == nil {
				continue // one that does not fit is as good as none
			}
			w := waitingSample{UID: t.UID, SampleIndex: t.SampleIndex, Name: name, Prompt: t.Prompt, Deadline: t.Group.Deadline}
			if dir != "" && t.Image != nil {
				w.Image = filepath.Join(dir, fmt.Sprintf("%s-%03d.png", t.UID, t.SampleIndex))
				img, err := client.New(b).Image(ctx, t.Trajectory)
				if err == nil {
					err = os.WriteFile(w.Image, img, 0o644)
				}
				if err != nil {
					return nil, fmt.Errorf("image of %s sample %d: %w", t.UID, t.SampleIndex, err)
				}
			}
			waiting = append(waiting, w)
		}
	}
	slices.SortFunc(waiting, func(a, b waitingSample) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.SampleIndex, b.SampleIndex), cmp.Compare(a.Name, b.Name))
	})
	return waiting, nil
}
