package flow

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Own is the sigmas of a pipeline that makes them by a rule of its own, by the keys of its card.
type Own struct {
	// Sigmas are those of rollouts, shifted, [T+1] for some numbers of steps T.
	Sigmas [][]float32 `json:"sigmas"`
	// Tokens is the only number of latent tokens that they are for; 0: any.
	Tokens int `json:"sigmas_tokens"`
}

// validate joins the faults of the lists.
func (o *Own) validate() error {
	var errs []error
	if len(o.Sigmas) == 0 {
		errs = append(errs, errors.New("sigmas: none; must be those of one number of steps or more"))
	}
	for i, list := range o.Sigmas {
		falls := len(list) > 1 && len(list) <= MaxSteps+1 && list[0] <= MaxSigma && list[len(list)-1] >= 0
		for k := 1; falls && k < len(list); k++ {
			falls = list[k] < list[k-1]
		}
		if !falls {
			errs = append(errs, fmt.Errorf("sigmas[%d]: %d values; must be 2 to %d that fall from at most %g to 0", i,
				len(list), MaxSteps+1, MaxSigma))
		}
	}
	return errors.Join(errs...)
}

// sigmas returns the list of a number of steps. Errors: there is none for these steps, or for as many tokens.
func (o *Own) sigmas(steps, tokens int) ([]float32, error) {
	if o.Tokens != 0 && tokens != o.Tokens {
		return nil, fmt.Errorf("height x width: %d latent tokens; must be the %d of the default size: the pipeline "+
			"has other sigmas at each size", tokens, o.Tokens)
	}
	var known []string
	for _, list := range o.Sigmas {
		if len(list) == steps+1 {
			return slices.Clone(list), nil
		}
		known = append(known, strconv.Itoa(len(list)-1))
	}
	return nil, fmt.Errorf("num_inference_steps: %d; must be one of %s: the pipeline lists its sigmas for these alone",
		steps, strings.Join(known, ", "))
}
