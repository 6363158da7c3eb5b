package scorer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Reward functions of texts. Those that compare an answer give 1 or 0, or a share for those that come near; those
// that look at the model's own distributions are means over all tokens that were generated, before temperature and
// filters, and have no value for an answer without tokens.
const (
	// ExactMatch is 1 where the answer is the ground truth, white space at its ends aside. Params: case (ignore).
	ExactMatch = "exact_match"
	// NumericMatch is 1 where the last number of the answer is that of the ground truth, or, without one, what the
	// prompt asks for: a sum, difference or product of two integers such as 347+58=?. Params: scale, a number above 0: an answer
	// that is off by d scores exp(-d/scale) instead of 0.
	NumericMatch = "numeric_match"
	// EntropyMean is the mean entropy, in nats; Confidence is 1 - that / ln V.
	EntropyMean = "entropy_mean"
	Confidence  = "confidence"
	// MaxProbMean is the mean probability of the likeliest token.
	MaxProbMean = "max_prob_mean"
	// TopKMass is the mean probability of the k likeliest tokens together. Params: k, default 5. It needs stored logits, topk
	// with at least as many or full, and raw.
	TopKMass = "topk_mass"
	// Turns is what the interaction gave the answers of a conversation. Params: of, last (the last answer's), sum or mean (of those
	// that have a score), default last.
	Turns = "turns"
)

var (
	matchParams   = []string{"case"}
	numericParams = []string{"scale"}
	topKParams    = []string{"k"}
	turnsParams   = []string{"of"}
)

// Text is a sample of a language model as reward functions see it.
type Text struct {
	// Messages is the conversation, Answer what the model says to it.
	Messages []Message
	Answer   string
	// TurnScores are those that an interaction gave the model's answers, the last is that of Answer; nil where it gave none.
	TurnScores []*float64
	// Entropies, in nats, TopLogProbs and LogProbs have one number for each token that was generated, by the model's
	// distribution before temperature and filters.
	Entropies, TopLogProbs, LogProbs []float32
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int
	// Trajectory is the subject under which the sample is stored; its events hold the logits.
	Trajectory string
	// TopLogits returns the logits of the k likeliest tokens of each token that was generated, the largest first, and their
	// log-sum-exps over all of the vocabulary. An error says why they are not stored.
	TopLogits func(ctx context.Context, k int) (logits [][]float32, lse []float32, err error)
}

// Message is one message of a conversation.
type Message struct {
	Role    string `json:"role" msgpack:"role"`
	Content string `json:"content" msgpack:"content"`
}

// ofText is a reward function of texts.
type ofText struct {
	name  string
	score func(ctx context.Context, in Input, o textOptions) Result
}

func newOfText(name string) Scorer {
	f := map[string]func(context.Context, Input, textOptions) Result{
		ExactMatch: exactMatch, NumericMatch: numericMatch, EntropyMean: entropyMean, Confidence: confidence, MaxProbMean: maxProbMean, TopKMass: topKMass, Turns: turnScores,
	}[name]
	if f == nil {
		return nil
	}
	return ofText{name, f}
}

func (s ofText) Name() string { return s.name }

func (s ofText) Version() string { return "1" }

func (s ofText) Score(ctx context.Context, in Input) (float64, error) {
	r := s.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail says what was compared.
func (s ofText) ScoreDetail(ctx context.Context, in Input) Result {
	err := ctx.Err()
	if err == nil && in.Text == nil {
		err = errors.New("no text")
	}
	o, fault := readOptions(in.Params)
	if err == nil {
		err = fault
	}
	if err != nil {
		return Result{Err: fmt.Errorf("%s: %w", s.name, err)}
	}
	r := s.score(ctx, in, o)
	if r.Err != nil {
		r.Err = fmt.Errorf("%s: %w", s.name, r.Err)
	}
	return r
}

// textOptions are params, read.
type textOptions struct {
	fold  bool
	scale float64 // 0: none
	k     int
	of    string
}

func readOptions(params map[string]string) (o textOptions, err error) {
	o.k, o.of = 5, "last"
	for name, value := range params {
		switch name {
		case "case":
			if o.fold = value == "ignore"; !o.fold {
				err = fmt.Errorf("params.case: %q; must be ignore", value)
			}
		case "scale":
			if o.scale, err = strconv.ParseFloat(value, 64); err != nil || !(o.scale > 0) || math.IsInf(o.scale, 0) {
				err = fmt.Errorf("params.scale: %q; must be a number above 0", value)
			}
		case "k":
			if o.k, err = strconv.Atoi(value); err != nil || o.k < 1 {
				err = fmt.Errorf("params.k: %q; must be a positive integer", value)
			}
		case "of":
			if o.of = value; !slices.Contains(turnsOf, value) {
				err = fmt.Errorf("params.of: %q; must be last, sum or mean", value)
			}
		default:
			err = fmt.Errorf("params: unknown name %q", name)
		}
		if err != nil {
			return o, err
		}
	}
	return o, nil
}

func exactMatch(_ context.Context, in Input, o textOptions) Result {
	if in.GroundTruth == "" {
		return Result{Err: errors.New("ground_truth: empty")}
	}
	a, b := strings.TrimSpace(in.Text.Answer), strings.TrimSpace(in.GroundTruth)
	return matched(a == b || o.fold && strings.EqualFold(a, b), in.Text.Answer)
}

func matched(same bool, answer string) Result {
	r := Result{Exact: &same, Detail: cut(strings.TrimSpace(answer))}
	if same {
		r.Value = 1
	}
	return r
}

var (
	numbers = regexp.MustCompile(`[-+]?[0-9][0-9,]*(\.[0-9]+)?`)
	asked   = regexp.MustCompile(`(-?[0-9]{1,15})\s*([-+*x×])\s*(-?[0-9]{1,15})\s*=`)
)

// NumericTarget is the number that an answer should be: the last of the ground truth, or what the sum in the prompt comes to.
func NumericTarget(prompt, groundTruth string) (float64, error) {
	if groundTruth != "" {
		x, ok := lastNumber(groundTruth)
		if !ok {
			return 0, fmt.Errorf("ground_truth: %.40q; must have a number in it", groundTruth)
		}
		return x, nil
	}
	m := asked.FindStringSubmatch(prompt)
	if m == nil {
		return 0, errors.New("ground_truth: empty, and the prompt is no sum such as 347+58=?")
	}
	a, _ := strconv.ParseFloat(m[1], 64) // of digits
	b, _ := strconv.ParseFloat(m[3], 64)
	switch m[2] {
	case "+":
		return a + b, nil
	case "-":
		return a - b, nil
	}
	return a * b, nil
}

// lastNumber of a text; commas in it group digits.
func lastNumber(s string) (float64, bool) {
	all := numbers.FindAllString(s, -1)
	if len(all) == 0 {
		return 0, false
	}
	x, err := strconv.ParseFloat(strings.ReplaceAll(all[len(all)-1], ",", ""), 64)
	return x, err == nil
}

// Asked is what the user asks in a conversation, the newest first: where functions look for what an answer should be.
func Asked(messages []Message) string {
	var texts []string
	for _, m := range slices.Backward(messages) {
		if m.Role == "user" {
			texts = append(texts, m.Content)
		}
	}
	return strings.Join(texts, "\n")
}

func numericMatch(_ context.Context, in Input, o textOptions) Result {
	want, err := NumericTarget(Asked(in.Text.Messages), in.GroundTruth)
	if err != nil {
		return Result{Err: err}
	}
	got, ok := lastNumber(in.Text.Answer)
	r := matched(ok && got == want, in.Text.Answer)
	if ok && got != want && o.scale > 0 {
		r.Value = math.Exp(-math.Abs(got-want) / o.scale)
	}
	return r
}

// CheckText refuses a function of texts that could not rate what a prompt asks for: has says why the k largest logits of each token are
// not stored, and conversation whether an interaction scores its turns.
func CheckText(name string, params map[string]string, has func(k int64) error, conversation bool) error {
	o, err := readOptions(params)
	switch {
	case err != nil: // Check has its own word on params
	case name == TopKMass:
		return has(int64(o.k))
	case name == Turns && !conversation:
		return errors.New("text.interaction: null; must be there: it scores the turns")
	}
	return nil
}

// Numbers of tokens that functions look at, which not every engine gives.
const (
	Entropies   = "entropies"
	TopLogProbs = "top_log_probs"
)

// LooksAt is which of these a function looks at; empty: none.
func LooksAt(name string) string {
	switch name {
	case EntropyMean, Confidence:
		return Entropies
	case MaxProbMean:
		return TopLogProbs
	}
	return ""
}

// errNoTokens is why the model's distributions have no mean.
var errNoTokens = errors.New("the answer has no tokens to take a mean over, or what drew them gave no such numbers")

func mean(list []float32, f func(float64) float64) (sum float64, err error) {
	if len(list) == 0 {
		return 0, errNoTokens
	}
	for _, x := range list {
		sum += f(float64(x))
	}
	return sum / float64(len(list)), nil
}

func entropyMean(_ context.Context, in Input, _ textOptions) (r Result) {
	r.Value, r.Err = mean(in.Text.Entropies, func(h float64) float64 { return h })
	return r
}

func confidence(_ context.Context, in Input, _ textOptions) (r Result) {
	if in.Text.Vocabulary < 2 {
		return Result{Err: fmt.Errorf("vocabulary: %d; must be at least 2", in.Text.Vocabulary)}
	}
	most := math.Log(float64(in.Text.Vocabulary))
	r.Value, r.Err = mean(in.Text.Entropies, func(h float64) float64 { return 1 - h/most })
	return r
}

func maxProbMean(_ context.Context, in Input, _ textOptions) (r Result) {
	r.Value, r.Err = mean(in.Text.TopLogProbs, math.Exp)
	return r
}

// turnsOf are the ways in which scores of turns make one.
var turnsOf = []string{"last", "sum", "mean"}

func turnScores(_ context.Context, in Input, o textOptions) (r Result) {
	var scored []float64
	for _, score := range in.Text.TurnScores {
		if score != nil {
			scored = append(scored, *score)
		}
	}
	all := in.Text.TurnScores
	switch {
	case len(scored) == 0:
		r.Err = errors.New("the interaction scored no answer")
		return r
	case o.of == "last" && all[len(all)-1] == nil:
		r.Err = errors.New("the interaction did not score the last answer; params.of can be sum or mean")
		return r
	case o.of == "last":
		r.Value = *all[len(all)-1]
	default:
		for _, score := range scored {
			r.Value += score
		}
		if o.of == "mean" {
			r.Value /= float64(len(scored))
		}
	}
	r.Detail = fmt.Sprintf("%d of %d answers scored", len(scored), len(all))
	return r
}

func topKMass(ctx context.Context, in Input, o textOptions) (r Result) {
	if len(in.Text.LogProbs) == 0 {
		return Result{Err: errNoTokens}
	}
	logits, lse, err := in.Text.TopLogits(ctx, o.k)
	if err != nil {
		return Result{Err: err}
	}
	for i, z := range logits {
		for _, x := range z {
			r.Value += math.Exp(float64(x) - float64(lse[i]))
		}
	}
	r.Value /= float64(len(logits))
	return r
}
