package estimator

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// The bootstrap (repeated random draws) of best@n, worst@n and maj@n, as in verl: how many draws, and their seed.
const (
	bootstrapDraws = 1000
	bootstrapSeed  = 42
)

// Variable is the values of one score over the samples of a prompt.
type Variable struct {
	Name   string
	Values []float64 // [N]
}

// ValidationGroup is the samples of one prompt of an evaluation.
type ValidationGroup struct {
	// Source is the name of its dataset.
	Source    string
	Variables []Variable
	// Answers [N] are the answers of the samples for the majority vote, such as the text read in each image; nil:
	// no vote. A Variable with another number of values has no vote.
	Answers []string
}

// Add adds a sample's value to the variable of that name.
func (g *ValidationGroup) Add(name string, value float64) {
	k := slices.IndexFunc(g.Variables, func(v Variable) bool { return v.Name == name })
	if k < 0 {
		k = len(g.Variables)
		g.Variables = append(g.Variables, Variable{Name: name})
	}
	g.Variables[k].Values = append(g.Variables[k].Values, value)
}

// Validation returns the metrics of an evaluation as verl names them, sorted:
//
//	val-core/{source}/{variable}/mean@N    and val-aux/... for all others
//
// The metrics of a prompt with N samples are mean@N and std@N over its samples, and for n = 2, 4, 8 .. N statistics
// of n samples that are drawn with replacement, 1000 times: best@n/mean and best@n/std of the best of the n,
// worst@n/mean and worst@n/std of the worst. With answers there are maj@n/mean and maj@n/std, of the first sample
// with the most frequent answer. Each metric is the mean over the prompts of the source.
//
// The core variable is acc, or reward if a source has no acc. Its mean@N, best@N and maj@N of the largest N are
// core. The draws come from PCG (math/rand/v2) with the seed 42 and are the same for every prompt.
func Validation(groups []ValidationGroup) []Metric {
	type key struct{ source, variable, metric string }
	type variable struct{ source, name string }
	sums := map[key][]float64{}
	core := map[string]string{}
	largest := map[variable]int{}
	for _, g := range groups {
		for _, v := range g.Variables {
			n := len(v.Values)
			if n == 0 {
				continue
			}
			if v.Name == "acc" || core[g.Source] == "" && v.Name == "reward" {
				core[g.Source] = v.Name
			}
			largest[variable{g.Source, v.Name}] = max(largest[variable{g.Source, v.Name}], n)
			put := func(metric string, value float64) {
				k := key{g.Source, v.Name, metric}
				sums[k] = append(sums[k], value)
			}
			all := momentsOf(v.Values)
			put(fmt.Sprintf("mean@%d", n), all.mean)
			if n == 1 {
				continue
			}
			put(fmt.Sprintf("std@%d", n), all.std(Config{StdBasis: schemas.BasisPopulation}))
			answers := g.Answers
			if len(answers) != n {
				answers = nil
			}
			for _, k := range subsets(n) {
				for name, m := range bootstrap(v.Values, answers, k) {
					put(fmt.Sprintf("%s@%d/mean", name, k), m.mean)
					put(fmt.Sprintf("%s@%d/std", name, k), m.std(Config{StdBasis: schemas.BasisPopulation}))
				}
			}
		}
	}
	var out []Metric
	for k, values := range sums {
		section := "val-aux"
		name, rest, _ := strings.Cut(k.metric, "@")
		n, _, _ := strings.Cut(rest, "/")
		if k.variable == core[k.source] && n == fmt.Sprint(largest[variable{k.source, k.variable}]) &&
			(name == "mean" || name == "best" || name == "maj") {
			section = "val-core"
		}
		out = append(out, Metric{fmt.Sprintf("%s/%s/%s/%s", section, k.source, k.variable, k.metric), meanOf(values)})
	}
	slices.SortFunc(out, func(a, b Metric) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// subsets returns 2, 4, 8 .. below n, and n.
func subsets(n int) []int {
	var out []int
	for k := 2; k < n; k *= 2 {
		out = append(out, k)
	}
	return append(out, n)
}

// bootstrap draws n of the values with replacement, bootstrapDraws times, for Validation. It
// returns the moments of the best ("best"), the worst ("worst") and, with answers (one for each
// value; nil: none), of the sample that the majority chose ("maj"). The seed is fixed: equal values
// give equal numbers.
func bootstrap(values []float64, answers []string, n int) map[string]moments {
	rng := rand.New(rand.NewPCG(bootstrapSeed, 0))
	best, worst, majority := make([]float64, bootstrapDraws), make([]float64, bootstrapDraws), make([]float64,
		bootstrapDraws)
	drawn := make([]int, n)
	for i := range bootstrapDraws {
		best[i], worst[i] = math.Inf(-1), math.Inf(1)
		for j := range drawn {
			drawn[j] = rng.IntN(len(values))
			best[i], worst[i] = max(best[i], values[drawn[j]]), min(worst[i], values[drawn[j]])
		}
		if answers != nil {
			majority[i] = values[majoritySample(answers, drawn)]
		}
	}
	out := map[string]moments{"best": momentsOf(best), "worst": momentsOf(worst)}
	if answers != nil {
		out["maj"] = momentsOf(majority)
	}
	return out
}

// majoritySample returns the index of the first drawn sample whose answer has the most votes among
// drawn, which are indices of answers, for bootstrap. Of answers with equally many votes it chooses
// the one that was drawn first.
func majoritySample(answers []string, drawn []int) int {
	votes := map[string]int{}
	for _, i := range drawn {
		votes[answers[i]]++
	}
	first := drawn[0]
	for _, i := range drawn {
		if votes[answers[i]] > votes[answers[first]] {
			first = i
		}
	}
	return first
}
