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
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// verdictLine is a verdict as users write it: a line of a file, or UID SAMPLE=VALUE.
type verdictLine struct {
	UID         schemas.UID `json:"uid"`
	SampleIndex *int64      `json:"sample_index"`
	Value       *float64    `json:"value"`
	Name        string      `json:"name"`
	Error       string      `json:"error"`
	Comment     string      `json:"comment"`
	Author      string      `json:"author"`
}

// verdictCommand makes the command 'meander verdict'.
func verdictCommand(a *app) *cobra.Command {
	var run schemas.Run
	var name, file, dir, author string
	c := &cobra.Command{
		Use:   "verdict [UID SAMPLE=VALUE ...]",
		Short: "give samples their external rewards (--reward external)",
		Long: `verdict is for rewards from people or batch jobs. Without arguments it lists the samples of a run that
wait for one; with --out it also writes their images. With a uid and values, or with a file, it stores
the verdicts. A group closes when its last verdict is there, or at its deadline.

A file has one JSON object on each line: {"uid": "...", "sample_index": 0, "value": 0.8}, and if you
like "name" (for external:NAME), "comment" and "author". A line with "error" instead of "value" says that
there will be no value. The first verdict of a sample counts.`,
		Example: `  meander up &
  meander publish --run demo --reward external 'a red sign that says "OPEN"'
  meander verdict --run demo --out images
  meander verdict --run demo p1 0=0.8 1=0.25    # p1 is the uid that it lists
  meander verdict --run demo --file verdicts.jsonl`,
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, given []string) error {
			var list []verdictLine
			var err error
			switch {
			case file != "" && len(given) > 0:
				return usage(errors.New("give verdicts as arguments or in --file, not both"))
			case file != "":
				list, err = readVerdicts(file, c.InOrStdin())
			case len(given) > 0:
				list, err = parseVerdicts(given)
			default:
				return a.showWaiting(c.Context(), conn.Bus, run, dir, c.OutOrStdout(), c.ErrOrStderr())
			}
			if err != nil {
				return usage(err)
			}
			for i := range list {
				list[i].Name, list[i].Author = cmp.Or(list[i].Name, name), cmp.Or(list[i].Author, author)
			}
			if err := publishVerdicts(c.Context(), conn.Bus, run, list); err != nil {
				return err
			}
			fmt.Fprintf(c.ErrOrStderr(), "%s given; see the groups with: meander show --run %s\n",
				present.Count(len(list), "verdict"), run)
			return nil
		}),
	}
	f := c.Flags()
	nameFlag(f, &run, "run", "", "run; default the latest")
	f.StringVar(&name, "name", "", "NAME of external:NAME; needed if a sample waits for several")
	f.StringVarP(&file, "file", "f", "", "file of verdicts as JSON lines, - for stdin")
	f.StringVar(&author, "author", "", "author of the verdicts")
	f.StringVar(&dir, "out", "", "folder for the images of waiting samples")
	return c
}

// publishVerdicts publishes the verdicts in their order, and stops at the first error, which says how many are given.
func publishVerdicts(ctx context.Context, b *bus.Bus, run schemas.Run, list []verdictLine) error {
	for i, j := range list {
		v, err := j.toEvent(ctx, b, run)
		if err == nil {
			err = checkOpen(ctx, b, v)
		}
		if err == nil {
			err = client.New(b).Verdict(ctx, v)
		}
		if err != nil {
			return fmt.Errorf("%s sample %d: %w; %d of %d verdicts are given", j.UID, *j.SampleIndex, err, i, len(list))
		}
	}
	return nil
}

// checkOpen refuses a verdict of a group that is closed already, which would count for nothing.
func checkOpen(ctx context.Context, b *bus.Bus, v *schemas.Verdict) error {
	status, err := view.ClosedAs(ctx, b, v)
	if status != "" {
		return fmt.Errorf("too late: its group has its result, %s", status)
	}
	if errors.Is(err, bus.ErrPermission) { // a scorer may give verdicts, and read no results
		return nil
	}
	return err
}

// parseVerdicts reads verdicts from the arguments UID SAMPLE=VALUE .... The error shows the form.
func parseVerdicts(given []string) ([]verdictLine, error) {
	if err := schemas.CheckToken("uid", given[0]); err != nil {
		return nil, err
	}
	if len(given) == 1 {
		return nil, fmt.Errorf("no values for %s; must be SAMPLE=VALUE, such as 0=0.8", given[0])
	}
	var out []verdictLine
	for _, s := range given[1:] {
		left, right, _ := strings.Cut(s, "=")
		sample, err1 := strconv.ParseInt(left, 10, 64)
		value, err2 := strconv.ParseFloat(right, 64)
		if err := errors.Join(err1, err2); err != nil || math.IsNaN(value) || math.IsInf(value, 0) {
			return nil, fmt.Errorf("%q; must be SAMPLE=VALUE, such as 0=0.8, and a finite value", s)
		}
		out = append(out, verdictLine{UID: schemas.UID(given[0]), SampleIndex: &sample, Value: &value})
	}
	return out, nil
}

// maxJudgements bounds a file of verdicts, in lines.
const maxJudgements = 1 << 20

// readVerdicts reads a file of verdicts as JSON lines, or stdin for "-". The error names the line and what it must be.
func readVerdicts(file string, stdin io.Reader) ([]verdictLine, error) {
	in := stdin
	if file != "-" {
		f, done, err := openInput(file)
		if err != nil {
			return nil, err
		}
		defer done()
		in = f
	}
	var out []verdictLine
	lines := bufio.NewScanner(in)
	n := 1
	for ; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var j verdictLine
		d := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		d.DisallowUnknownFields()
		err := errors.Join(strictjson.Check(lines.Bytes()), d.Decode(&j))
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
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%s: line %d: more than %d KiB; must be one verdict, with texts of at most %d bytes",
			file, n, bufio.MaxScanTokenSize>>10, schemas.MaxText)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: no verdicts in it; must be JSON lines such as "+
			`{"uid": "p1", "sample_index": 0, "value": 0.8}`, file)
	}
	return out, nil
}

// toEvent checks that the sample exists and needs this verdict, and returns it as an event. The error says what the
// sample waits for.
func (j verdictLine) toEvent(ctx context.Context, b *bus.Bus, run schemas.Run) (*schemas.Verdict, error) {
	t, err := view.Ended(ctx, b, run, j.UID, *j.SampleIndex)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, fmt.Errorf("run %q has no such sample, or it is not finished; 'meander verdict --run %s' lists "+
			"what waits", run, run)
	}
	if err != nil {
		return nil, err
	}
	names := view.VerdictNames(&t.Group)
	switch {
	case len(names) == 0:
		return nil, errors.New("it has no external reward function")
	case j.Name == "" && len(names) > 1:
		return nil, fmt.Errorf("it waits for %s; say which with --name", strings.Join(names, " and "))
	case j.Name != "" && !slices.Contains(names, j.Name):
		return nil, fmt.Errorf("name %q; it waits for %s", j.Name, strings.Join(names, " and "))
	}
	return &schemas.Verdict{
		Run: run, UID: j.UID, SampleIndex: *j.SampleIndex, Name: cmp.Or(j.Name, names[0]), Value: j.Value,
		Error: j.Error, Comment: j.Comment, Author: j.Author, At: time.Now().UnixNano(),
	}, nil
}

// showWaiting lists the samples of a run that wait for a verdict; with dir it also writes their images there.
func (a *app) showWaiting(ctx context.Context, b *bus.Bus, run schemas.Run, dir string, out, stderr io.Writer) error {
	waiting, err := view.WaitingForVerdicts(ctx, b, run, "*")
	if err == nil && dir != "" {
		err = writeWaiting(ctx, b, waiting, dir)
	}
	if err != nil {
		return err
	}
	if a.json {
		return encode(out, waiting...)
	}
	if len(waiting) == 0 {
		fmt.Fprintf(stderr, "no finished sample of run %s waits for a verdict\n", run)
		return nil
	}
	fmt.Fprintf(out, "run %s\n", run)
	t := present.New("UID", "SAMPLE", "NAME", "UNTIL", "PROMPT")
	for _, w := range waiting {
		until := "-"
		if w.Deadline > 0 {
			until = time.Unix(0, w.Deadline).Local().Format(time.DateTime)
		}
		t.Row(w.UID, w.SampleIndex, w.Name, until, present.Cut(w.Prompt, 60))
	}
	t.Print(out)
	return nil
}

// writeWaiting writes the media of samples that wait for a verdict into a folder, and notes their paths in the list.
func writeWaiting(ctx context.Context, b *bus.Bus, waiting []view.Waiting, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return usage(fmt.Errorf("--out: %w", err))
	}
	for i := range waiting {
		w := &waiting[i]
		files, err := results.WriteMedia(ctx, b, w.Trajectory, dir, w.UID)
		if err != nil {
			return err
		}
		w.Image, w.Audio = files[schemas.KindImage].Path, files[schemas.KindAudio].Path
	}
	return nil
}
