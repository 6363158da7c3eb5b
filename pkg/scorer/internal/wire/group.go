package wire

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Rate encodes the members of a group for the instance name, one by one, has ask send them, and returns a result for
// each member of g. One that cannot be encoded has that error, and is missing in the request. ask returns the decoded
// reply.
func Rate(ctx context.Context, g scorer.Group, name, format string,
	ask func(r *schemas.ScoreRequest, trace map[string][]string) (map[string]any, error),
) []scorer.Result {
	results := make([]scorer.Result, len(g.Members))
	sent, trace, places, err := encodeGroup(ctx, g, name, format, results)
	var rated []scorer.Result
	if err == nil && len(places) > 0 {
		var reply map[string]any
		if reply, err = ask(sent, trace); err == nil {
			var preferences []scorer.Preference
			rated, preferences, err = readGroup(reply, sent.Members)
			for i, x := range preferences {
				preferences[i].A, preferences[i].B = places[x.A], places[x.B]
			}
			if g.Compared != nil {
				g.Compared(preferences)
			}
		}
	}
	for k, i := range places {
		if results[i].Err = err; err == nil {
			results[i] = rated[k]
		}
	}
	return results
}

// encodeGroup returns the request for a group, the headers of its trace context, and the places in g of the members
// that are in it. Those of others get their error in results.
func encodeGroup(ctx context.Context, g scorer.Group, name, format string, results []scorer.Result,
) (out *schemas.ScoreRequest, trace map[string][]string, places []int, err error) {
	missing, size, members := make([]schemas.ScoreMissing, len(g.Missing)), 0, []schemas.ScoreMember{}
	for i, m := range g.Missing {
		missing[i] = schemas.ScoreMissing{SampleIndex: m.Index, Why: m.Why}
	}
	for i, index := range g.Members {
		in, release, err := g.Sample(ctx, i)
		var sample Sample
		if err == nil {
			sample, err = NewSample(in, format)
			release()
		}
		if errors.Is(err, scorer.ErrUnavailable) {
			return nil, nil, nil, failAll(results, err)
		}
		if err != nil {
			results[i].Err = err
			missing = append(missing, schemas.ScoreMissing{SampleIndex: index, Why: err.Error()})
			continue
		}
		out, trace = sample.asked(name), in.Trace
		members = append(members, schemas.ScoreMember{SampleIndex: index, ScoreSample: sample.ScoreSample})
		places = append(places, i)
		if size += bytesOf(&sample.ScoreSample); size > schemas.MaxGroupFiles {
			err = fmt.Errorf("the files of a group of %d take more than %d MiB as %s; must be fewer or smaller: set "+
				"image: jpeg or fewer frames", len(g.Members), schemas.MaxGroupFiles>>20, format)
			return nil, nil, nil, failAll(results, err)
		}
	}
	if out != nil {
		slices.SortFunc(missing, func(a, b schemas.ScoreMissing) int { return int(a.SampleIndex - b.SampleIndex) })
		out.GroupSize, out.Members, out.Missing = g.Size, members, missing
	}
	return out, trace, places, nil
}

func failAll(results []scorer.Result, err error) error {
	for i := range results {
		results[i].Err = err
	}
	return err
}

// bytesOf returns what the files and texts of a sample take.
func bytesOf(s *schemas.ScoreSample) int {
	n := len(s.Image) + len(s.Audio)
	for _, f := range s.Frames {
		n += len(f)
	}
	for _, c := range s.Conditions {
		n += len(c.File)
	}
	if s.Text != nil {
		n += len(*s.Text)
	}
	for _, m := range s.Messages {
		n += len(m.Content)
	}
	return n
}

// readGroup returns the results of the members of a request by a reply: scores by sample_index, or preferences. A reply
// that names another sample, or one twice, is an error; a member without a score has an error of its own.
func readGroup(m map[string]any, members []schemas.ScoreMember) ([]scorer.Result, []scorer.Preference, error) {
	place := func(path string, v any) (int, error) {
		index, err := Number(v)
		i := slices.IndexFunc(members, func(x schemas.ScoreMember) bool { return float64(x.SampleIndex) == index })
		if err != nil || i < 0 {
			return 0, fmt.Errorf("reply: %s: %s; must be the sample_index of a member", path, Show(v))
		}
		return i, nil
	}
	scores, err := List(m, "scores", -1)
	preferences, err2 := List(m, "preferences", -1)
	switch err := errors.Join(err, err2); {
	case err != nil:
		return nil, nil, fmt.Errorf("reply: %w", err)
	case scores != nil && preferences != nil:
		return nil, nil, errors.New("reply: scores and preferences; must be one of the two")
	case preferences != nil:
		compared, err := readPreferences(preferences, place)
		if err != nil {
			return nil, nil, err
		}
		return scorer.WinRates(len(members), compared), compared, nil
	case scores == nil:
		return nil, nil, errors.New("reply: neither scores nor preferences nor error; does the function rate whole " +
			"groups?")
	}
	out, seen := make([]scorer.Result, len(members)), make([]bool, len(members))
	for k, v := range scores {
		path := fmt.Sprintf("scores[%d]", k)
		x, ok := v.(map[string]any)
		if !ok {
			return nil, nil, fmt.Errorf("reply: %s: %s; must be a map of sample_index and score", path, Show(v))
		}
		i, err := place(path+".sample_index", x["sample_index"])
		if err != nil {
			return nil, nil, err
		}
		if seen[i] {
			return nil, nil, fmt.Errorf("reply: %s.sample_index: %d; comes twice", path, members[i].SampleIndex)
		}
		seen[i] = true
		failure, err := Text(x, "error")
		detail, err2 := Text(x, "detail")
		switch err := errors.Join(err, err2); {
		case err != nil:
			return nil, nil, fmt.Errorf("reply: %s.%w", path, err)
		case failure != "":
			out[i].Err = fmt.Errorf("worker: %s", Quote(failure))
		default:
			if out[i].Value, err = Number(x["score"]); err != nil {
				out[i] = scorer.Result{Err: fmt.Errorf("score %w", err)}
			} else {
				out[i].Detail = Detail(detail)
			}
		}
	}
	for i, ok := range seen {
		if !ok {
			out[i].Err = fmt.Errorf("reply: no score of sample %d", members[i].SampleIndex)
		}
	}
	return out, nil, nil
}

// readPreferences returns what compares members, by their places.
func readPreferences(list []any, place func(path string, v any) (int, error)) ([]scorer.Preference, error) {
	if len(list) > schemas.MaxPreferences {
		return nil, fmt.Errorf("reply: %d preferences; must be at most %d", len(list), schemas.MaxPreferences)
	}
	out := make([]scorer.Preference, len(list))
	for k, v := range list {
		path := fmt.Sprintf("preferences[%d]", k)
		x, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("reply: %s: %s; must be a map of a, b and p", path, Show(v))
		}
		a, err := place(path+".a", x["a"])
		b, err2 := place(path+".b", x["b"])
		p, err3 := Number(x["p"])
		switch {
		case err != nil || err2 != nil:
			return nil, errors.Join(err, err2)
		case err3 != nil || p < 0 || p > 1:
			return nil, fmt.Errorf("reply: %s.p: %s; must be 0 to 1", path, Show(x["p"]))
		case a == b:
			return nil, fmt.Errorf("reply: %s: compares sample %s with itself", path, Show(x["a"]))
		}
		out[k] = scorer.Preference{A: a, B: b, P: p}
	}
	return out, nil
}
