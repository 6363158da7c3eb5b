package estimator

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// The bootstrap of best@n and worst@n, as in verl: how many draws, and their seed.
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
	// Source is the dataset it is from.
	Source    string
	Variables []Variable
}

// Validation returns the metrics of an evaluation as verl names them, sorted:
//
//	val-core/{source}/{variable}/mean@N    and val-aux/... for all others
//
// with mean@N and std@N over the N samples of a prompt, and best@n/mean, best@n/std,
// worst@n/mean and worst@n/std, n = 2, 4, 8 .. N, of the best and the worst of n samples
// drawn with replacement, 1000 times. Each is the mean over the prompts of the source.
// The core variable is acc, or reward where there is no acc; of it mean@N and the best@N
// and worst@N of all samples are core. The draws come from PCG (math/rand/v2) with the
// seed 42 and are the same for every prompt. maj@n needs answers to count, which
// pictures do not have.
func Validation(groups []ValidationGroup) []Metric {
	type key struct{ source, variable, metric string }
	sums := map[key][]float64{}
	core := map[string]string{}
	size := map[key]int{}
	for _, g := range groups {
		for _, v := range g.Variables {
			n := len(v.Values)
			if n == 0 {
				continue
			}
			if v.Name == "acc" || core[g.Source] == "" && v.Name == "reward" {
				core[g.Source] = v.Name
			}
			put := func(metric string, value float64) {
				k := key{g.Source, v.Name, metric}
				sums[k] = append(sums[k], value)
				size[k] = n
			}
			all := spread(v.Values)
			put(fmt.Sprintf("mean@%d", n), all.mean)
			if n == 1 {
				continue
			}
			put(fmt.Sprintf("std@%d", n), all.std(Config{StdBasis: BasisPopulation}))
			for _, k := range subsets(n) {
				best, worst := bootstrap(v.Values, k)
				put(fmt.Sprintf("best@%d/mean", k), best.mean)
				put(fmt.Sprintf("best@%d/std", k), best.std(Config{StdBasis: BasisPopulation}))
				put(fmt.Sprintf("worst@%d/mean", k), worst.mean)
				put(fmt.Sprintf("worst@%d/std", k), worst.std(Config{StdBasis: BasisPopulation}))
			}
		}
	}
	var out []Metric
	for k, values := range sums {
		n := size[k]
		section := "val-aux"
		switch k.metric {
		case fmt.Sprintf("mean@%d", n), fmt.Sprintf("best@%d/mean", n), fmt.Sprintf("worst@%d/mean", n):
			if k.variable == core[k.source] {
				section = "val-core"
			}
		}
		out = append(out, Metric{fmt.Sprintf("%s/%s/%s/%s", section, k.source, k.variable, k.metric), meanOf(values)})
	}
	slices.SortFunc(out, func(a, b Metric) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// subsets are 2, 4, 8 .. below n, and n.
func subsets(n int) []int {
	var out []int
	for k := 2; k < n; k *= 2 {
		out = append(out, k)
	}
	return append(out, n)
}

// bootstrap draws n of the values, with replacement, again and again, and returns the
// moments of the best and of the worst.
func bootstrap(values []float64, n int) (best, worst moments) {
	rng := rand.New(rand.NewPCG(bootstrapSeed, 0))
	highs, lows := make([]float64, bootstrapDraws), make([]float64, bootstrapDraws)
	for i := range bootstrapDraws {
		high, low := math.Inf(-1), math.Inf(1)
		for range n {
			v := values[rng.IntN(len(values))]
			high, low = max(high, v), min(low, v)
		}
		highs[i], lows[i] = high, low
	}
	return spread(highs), spread(lows)
}
