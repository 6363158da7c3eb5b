package integration_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// Every estimator rates groups of texts. What discounts, or counts trained steps, counts the tokens that a sample
// generated over all its turns: what was given has no advantage, and takes no part.
func TestEstimators_Texts(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *config) { o.sampler.Model = sumsFolder(t) })
	type asked struct {
		name  string
		gamma *float64
	}
	list := []asked{{estimator.ReinforcePlusPlus, new(0.9)}}
	for _, name := range estimator.Names() {
		list = append(list, asked{name: name})
	}
	for i, a := range list {
		for g, prompt := range []string{"999+1=?", "7+2=?"} {
			_, err := w.client.Publish(t.Context(), schemas.Run(fmt.Sprintf("r%d", i)), &schemas.Prompt{
				UID: schemas.UID(fmt.Sprint("g", g)), Prompt: prompt, Seed: new(int64(3)), GroupSize: new(int64(4)),
				Batch:     &schemas.BatchSpec{ID: "b", Groups: 2},
				Text:      &schemas.Text{Interaction: &schemas.Interaction{Name: "sums", MaxTurns: new(int64(3))}},
				Reward:    []schemas.RewardSpec{{Name: "numeric_match", Weight: new(1.0)}, {Name: "confidence", Weight: new(0.3)}},
				Advantage: schemas.AdvantageSpec{Estimator: a.name, Gamma: a.gamma},
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, a := range list {
		run := schemas.Run(fmt.Sprintf("r%d", i))
		results := w.advantages(t, run, 2)
		var tokens, returns [][]float64 // of each sample: what it has, and its returns
		turns := map[int]bool{}
		for g := range 2 {
			group := results[schemas.UID(fmt.Sprint("g", g))]
			if group.Status != schemas.StatusComplete {
				t.Fatalf("%s: %+v", a.name, group)
			}
			for k, m := range group.Members {
				text := w.trajectory(t, run, group.UID, int64(k)).Text
				turns[len(text.Turns)] = true
				if n := text.Generated(); m.Advantage == nil || m.Tokens == nil || *m.Tokens != n {
					t.Fatalf("%s: %+v; want an advantage, and %d tokens", a.name, m, n)
				}
				if (m.StepAdvantages != nil) != (a.gamma != nil) {
					t.Errorf("%s: %d advantages of tokens", a.name, len(m.StepAdvantages))
				}
				own, discounted, gamma := m.StepAdvantages, *m.Reward, 1.0
				if a.gamma != nil {
					gamma = *a.gamma
				}
				row := make([]float64, *m.Tokens)
				for at := len(row) - 1; at >= 0; at-- {
					row[at], discounted = discounted, discounted*gamma
				}
				for len(own) < len(row) {
					own = append(own, *m.Advantage)
				}
				tokens, returns = append(tokens, own), append(returns, row)
			}
		}
		if len(turns) < 2 {
			t.Error("all conversations are as long; take another seed")
		}
		if a.name == estimator.ReinforcePlusPlus {
			whitened(t, a.gamma, tokens, returns)
		}
	}
}

// whitened compares the advantages of tokens with their returns, whitened over all of them.
func whitened(t *testing.T, gamma *float64, tokens, returns [][]float64) {
	t.Helper()
	var n, sum, squares float64
	for _, row := range returns {
		for _, r := range row {
			n, sum = n+1, sum+r
		}
	}
	for _, row := range returns {
		for _, r := range row {
			squares += (r - sum/n) * (r - sum/n)
		}
	}
	for i, row := range returns {
		for at, r := range row {
			if want := (r - sum/n) / math.Sqrt(squares/(n-1)+1e-8); !(math.Abs(tokens[i][at]-want) < 1e-9) {
				t.Errorf("gamma %v: sample %d, token %d of %d: %v; want %v", gamma, i, at, len(row), tokens[i][at],
					want)
			}
		}
	}
}
