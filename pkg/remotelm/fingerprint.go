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

// fewTop is how many numbers to ask for with each token, if not all: that of the drawn token, which vLLM always
// puts first, and the largest.
const fewTop = 2

// fingerprint finds out the route for tokens and what the numbers are that come with them: no server says whether
// they are log-probs or logits, nor of which distribution. It draws tokens at two temperatures. Numbers before
// temperature have the same gap between the two largest at both temperatures. Exponentials of log-probs sum to at
// most 1, those of logits may exceed it.
func (s *Server) fingerprint(ctx context.Context) error {
	var plain topTwo
	var err error
	for _, s.facts.Route = range s.dialect.routes() {
		if plain, err = s.measureTopTwo(ctx, 1, fewTop); !routeClosed(err) {
			break
		}
	}
	var hot topTwo
	if err == nil {
		hot, err = s.measureTopTwo(ctx, 0.5, fewTop)
	}
	if err != nil {
		return fmt.Errorf("ask for a token with its log-probs: %w", err)
	}
	before := math.Abs(hot.gap-plain.gap) < math.Abs(hot.gap-2*plain.gap)
	logits := plain.mass > 1.001 || hot.mass > 1.001
	switch {
	case logits && !before:
		return fmt.Errorf("%w: it gives processed logits; start it with --logprobs-mode raw_logits, of which all else follows, or raw_logprobs", ErrRefused)
	case logits:
		switch _, err := s.measureTopTwo(ctx, 1, -1); {
		case errors.Is(err, ErrGarbage): // of another vocabulary
			return fmt.Errorf("%w: %w", ErrRefused, err)
		case err != nil:
			return fmt.Errorf("it gives logits, of which a log-prob follows where all of a token are there; start it with --max-logprobs -1, or with --logprobs-mode raw_logprobs: %w", err)
		}
		s.facts.Values = Logits
	case before:
		s.facts.Values = Raw
	default:
		s.facts.Values = s.dialect.processedKind()
	}
	return nil
}

// routeClosed reports whether err says that a route does not exist or is not open.
func routeClosed(err error) bool {
	r, ok := errors.AsType[*remotehttp.StatusError](err)
	return ok && (r.Status == http.StatusNotFound || r.Status == http.StatusForbidden || r.Status == http.StatusMethodNotAllowed)
}

// topTwo is what fingerprint concludes the kind of numbers from: the gap between the two largest numbers that come
// with a token, and the sum of their exponentials (mass).
type topTwo struct{ gap, mass float64 }

// measureTopTwo has the server draw one token after ProbeIDs, from the two likeliest, and measures the numbers that
// come with it. top is how many numbers to ask for; -1: all. It fails as generate does, and wraps ErrRefused if there
// are fewer than two numbers.
func (s *Server) measureTopTwo(ctx context.Context, temperature float64, top int) (p topTwo, err error) {
	r := Request{ID: "meander-probe", IDs: s.config.ProbeIDs, MaxTokens: 1, Temperature: temperature, TopP: 1, TopK: 2, Seed: 1}
	err = s.generate(ctx, r, top, func(e event) bool {
		for _, t := range e.tokens {
			of := map[int32]float64{t.id: t.value}
			for i, id := range t.ids {
				of[id] = t.of[i]
			}
			var values []float64
			for _, v := range of {
				values = append(values, v)
			}
			if slices.SortFunc(values, func(a, b float64) int { return cmp.Compare(b, a) }); len(values) > 1 {
				p = topTwo{gap: values[0] - values[1], mass: math.Exp(values[0]) + math.Exp(values[1])}
			}
		}
		return true
	})
	if err == nil && p == (topTwo{}) {
		err = fmt.Errorf("%w: no numbers of the two likeliest tokens", ErrRefused)
	}
	return p, err
}
