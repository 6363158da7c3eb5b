package wire

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Group is a request for a whole group: schemas.ScoreRequest, as servers get it, too.
type Group struct {
	V    int    `json:"v" msgpack:"v"`
	Name string `json:"name" msgpack:"name"`
	Asked
	GroupSize int64            `json:"group_size" msgpack:"group_size"`
	Members   []Member         `json:"members" msgpack:"members"`
	Missing   []scorer.Missing `json:"missing" msgpack:"missing"`
	// Trace are the headers of the trace context.
	Trace map[string][]string `json:"-" msgpack:"-"`
}

// Member is a sample of a Group.
type Member struct {
	SampleIndex int64 `json:"sample_index" msgpack:"sample_index"`
	Seen
}

// Encode returns the map of the member, as a blob.
func (m *Member) Encode() ([]byte, error) { return msgpack.Marshal(m) }

// Rate encodes the members of a group for the instance name, one by one, has ask send them, and returns a result for
// each member of g. One that cannot be encoded has that error, and is missing in the request. ask returns the decoded
// reply.
func Rate(ctx context.Context, g scorer.Group, name, format string, ask func(Group) (map[string]any, error),
) []scorer.Result {
	results := make([]scorer.Result, len(g.Members))
	sent, places, err := encodeGroup(ctx, g, name, format, results)
	var rated []scorer.Result
	if err == nil && len(places) > 0 {
		var reply map[string]any
		if reply, err = ask(sent); err == nil {
			rated, err = readGroup(reply, sent.Members)
		}
	}
	for k, i := range places {
		if results[i].Err = err; err == nil {
			results[i] = rated[k]
		}
	}
	return results
}

// encodeGroup returns the request for a group, and the places in g of the members that are in it. Those of others get
// their error in results.
func encodeGroup(ctx context.Context, g scorer.Group, name, format string, results []scorer.Result,
) (out Group, places []int, err error) {
	out = Group{V: Version, Name: name, GroupSize: g.Size, Members: []Member{}, Missing: slices.Clone(g.Missing)}
	if out.Missing == nil {
		out.Missing = []scorer.Missing{}
	}
	size := 0
	for i, index := range g.Members {
		in, release, err := g.Sample(ctx, i)
		var sample Sample
		if err == nil {
			sample, err = NewSample(in, format)
			release()
		}
		if errors.Is(err, scorer.ErrUnavailable) {
			return out, nil, failAll(results, err)
		}
		if err != nil {
			results[i].Err = err
			out.Missing = append(out.Missing, scorer.Missing{Index: index, Why: err.Error()})
			continue
		}
		out.Asked, out.Trace = sample.Asked, in.Trace
		out.Members = append(out.Members, Member{index, sample.Seen})
		places = append(places, i)
		if size += sample.bytes(); size > schemas.MaxGroupFiles {
			err = fmt.Errorf("the files of a group of %d take more than %d MiB as %s; must be fewer or smaller: set "+
				"image: jpeg or fewer frames", len(g.Members), schemas.MaxGroupFiles>>20, format)
			return out, nil, failAll(results, err)
		}
	}
	slices.SortFunc(out.Missing, func(a, b scorer.Missing) int { return int(a.Index - b.Index) })
	return out, places, nil
}

func failAll(results []scorer.Result, err error) error {
	for i := range results {
		results[i].Err = err
	}
	return err
}

// bytes returns what the files and texts of a sample take.
func (s *Seen) bytes() int {
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
func readGroup(m map[string]any, members []Member) ([]scorer.Result, error) {
	place := func(path string, v any) (int, error) {
		index, err := Number(v)
		i := slices.IndexFunc(members, func(x Member) bool { return float64(x.SampleIndex) == index })
		if err != nil || i < 0 {
			return 0, fmt.Errorf("reply: %s: %s; must be the sample_index of a member", path, Show(v))
		}
		return i, nil
	}
	scores, err := List(m, "scores", -1)
	preferences, err2 := List(m, "preferences", -1)
	switch err := errors.Join(err, err2); {
	case err != nil:
		return nil, fmt.Errorf("reply: %w", err)
	case scores != nil && preferences != nil:
		return nil, errors.New("reply: scores and preferences; must be one of the two")
	case preferences != nil:
		return readPreferences(preferences, len(members), place)
	case scores == nil:
		return nil, errors.New("reply: neither scores nor preferences nor error; does the function rate whole groups?")
	}
	out, seen := make([]scorer.Result, len(members)), make([]bool, len(members))
	for k, v := range scores {
		path := fmt.Sprintf("scores[%d]", k)
		x, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("reply: %s: %s; must be a map of sample_index and score", path, Show(v))
		}
		i, err := place(path+".sample_index", x["sample_index"])
		if err != nil {
			return nil, err
		}
		if seen[i] {
			return nil, fmt.Errorf("reply: %s.sample_index: %d; comes twice", path, members[i].SampleIndex)
		}
		seen[i] = true
		failure, err := Text(x, "error")
		detail, err2 := Text(x, "detail")
		switch err := errors.Join(err, err2); {
		case err != nil:
			return nil, fmt.Errorf("reply: %s.%w", path, err)
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
	return out, nil
}

// readPreferences returns the win rates of n members.
func readPreferences(list []any, n int, place func(path string, v any) (int, error)) ([]scorer.Result, error) {
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
	return scorer.WinRates(n, out), nil
}
