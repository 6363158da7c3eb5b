package remotelm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

const (
	// fewTop is how many numbers to ask for with each token, if not all: that of the drawn token, which vLLM always
	// puts first, and the largest.
	fewTop = 2
	// manyTop is how many numbers vLLM gives if it was started without --max-logprobs.
	manyTop = 20
	// massSlack is how far the exponentials of a row of log-probs may sum up from 1: they are rounded to float32.
	massSlack = 1e-3
)

// fingerprint finds out the route for tokens, what the numbers are that come with them, and the element type of the
// model's logits: no server says whether its numbers are log-probs or logits, nor of which distribution. It draws
// tokens at two temperatures: numbers before temperature have the same gap between the two largest at both. Then it
// asks for the numbers of all tokens: the exponentials of log-probs sum to 1, those of logits to something else.
func (s *Server) fingerprint(ctx context.Context) error {
	var plain []float64
	var err error
	for _, s.facts.Route = range s.dialect.routes {
		if plain, err = s.measure(ctx, 1, fewTop); !routeClosed(err) {
			break
		}
	}
	var hot []float64
	if err == nil {
		hot, err = s.measure(ctx, 0.5, fewTop)
	}
	if err != nil {
		return fmt.Errorf("ask for a token with its log-probs: %w", err)
	}
	logits, whole, err := s.givesLogits(ctx, plain)
	if err != nil {
		return err
	}
	was, is := plain[0]-plain[1], hot[0]-hot[1]
	before := math.Abs(is-was) < math.Abs(is-2*was)
	switch {
	case logits && !before:
		return fmt.Errorf("%w: it gives processed logits; start it with --logprobs-mode raw_logits, of which all "+
			"else follows, or raw_logprobs", ErrRefused)
	case logits && !whole:
		return fmt.Errorf("%w: it gives logits, of which a log-prob follows where all of a token are there; start "+
			"it with --max-logprobs -1, or with --logprobs-mode raw_logprobs", ErrRefused)
	case logits:
		s.facts.Values = Logits
	case before:
		s.facts.Values = Raw
	default:
		s.facts.Values = s.dialect.processedKind
	}
	return nil
}

// givesLogits reports whether the numbers of tokens are logits, and whether the server gives those of all tokens
// (whole). plain are the two largest. Where it does not give all, fewer must do: log-probs of the k likeliest of V
// tokens have a mass between k/V and 1. An error says that the server serves another vocabulary, or is one of measure.
func (s *Server) givesLogits(ctx context.Context, plain []float64) (logits, whole bool, err error) {
	row, err := s.measure(ctx, 1, -1)
	switch {
	case err == nil:
		s.numbers, s.facts.Precision = row, precisionOf(row)
		return math.Abs(math.Log(massOf(row))) > massSlack, true, nil
	case errors.Is(err, ErrRefused): // it gives fewer
	case errors.Is(err, ErrGarbage):
		return false, false, fmt.Errorf("%w: it serves another model than that of the folder: %w", ErrRefused, err)
	default:
		return false, false, fmt.Errorf("ask for the numbers of all tokens: %w", err)
	}
	switch row, err = s.measure(ctx, 1, manyTop); {
	case err == nil:
		row = row[:min(len(row), manyTop)]
		s.facts.Precision = precisionOf(row)
	case errors.Is(err, ErrRefused):
		row = plain
	default:
		return false, false, fmt.Errorf("ask for the numbers of some tokens: %w", err)
	}
	s.numbers = row
	mass, least := massOf(row), float64(len(row))/float64(s.config.Vocabulary)
	return mass > 1+massSlack || mass < least*(1-massSlack), false, nil
}

// massOf returns the sum of the exponentials of numbers.
func massOf(values []float64) (sum float64) {
	for _, v := range values {
		sum += math.Exp(v)
	}
	return sum
}

// descending compares two numbers, the larger first.
func descending(a, b float64) int { return cmp.Compare(b, a) }

// precisionOf returns the element type of logits, from the numbers of many tokens, logits or log-probs. The differences
// of most neighbours are multiples of a power of two: the usual size of a logit times about 2^-8 in bf16 and 2^-11 in
// fp16. That size is taken from the standard deviation, as log-probs do not show it: logits in fp16 that are all far
// from 0 pass for bf16. log-probs also blur the multiples by their rounding to float32. In fp32 there is no such power
// that can be seen.
func precisionOf(row []float64) string {
	const rounded, coarsest, finest = 3e-6, 0x1p-2, 0x1p-14
	mean, square := 0.0, 0.0
	for _, v := range row {
		mean += v / float64(len(row))
	}
	for _, v := range row {
		square += (v - mean) * (v - mean) / float64(len(row))
	}
	for grid := coarsest; grid >= finest; grid /= 2 {
		fit, seen := 0, 0
		for i := 1; i < len(row); i++ {
			if d := row[i] - row[i-1]; math.Abs(d) > grid/2 {
				seen++
				if math.Abs(math.Remainder(d, grid)) < rounded {
					fit++
				}
			}
		}
		switch {
		case 2*fit <= seen || seen < len(row)/3: // or too many are equal
		case grid > math.Sqrt(square)*0x1p-10:
			return "bf16"
		default:
			return "fp16"
		}
	}
	return "fp32"
}

// routeClosed reports whether err says that a route does not exist or is not open.
func routeClosed(err error) bool {
	return slices.Contains([]int{http.StatusNotFound, http.StatusForbidden, http.StatusMethodNotAllowed},
		remotehttp.Answered(err))
}

// measure has the server draw one token after ProbeIDs, and returns the numbers that come with it: the top largest in
// descending order, two at least; or, if top is -1, those of all tokens by id. The token is one of the two likeliest,
// unless all numbers are asked for: a filter would hide them. It fails as generate does, and wraps ErrRefused if there
// are fewer than two numbers.
func (s *Server) measure(ctx context.Context, temperature float64, top int) (values []float64, err error) {
	r := Request{ID: "meander-probe", IDs: s.config.ProbeIDs, MaxTokens: 1, Temperature: temperature, TopP: 1, Seed: 1}
	if top == fewTop {
		r.TopK = 2
	}
	err = s.generate(ctx, r, top, func(e event) bool {
		for _, w := range e.weights {
			s.version = w.Version
		}
		for _, t := range e.tokens {
			of := map[int32]float64{t.id: t.value}
			for i, id := range t.ids {
				of[id] = t.of[i]
			}
			values = nil
			for id := range int32(s.config.Vocabulary) {
				if v, given := of[id]; given {
					values = append(values, max(v, vllmLeast)) // differences of infinities are no numbers
				}
			}
		}
		return true
	})
	if err == nil && len(values) < 2 {
		err = fmt.Errorf("%w: no numbers of the two likeliest tokens", ErrRefused)
	}
	if top != -1 {
		slices.SortFunc(values, descending)
	}
	return values, err
}
