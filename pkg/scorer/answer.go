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

// Reward functions of texts. The first two compare the answer and give 1 or 0, or a value between for an answer that
// comes near. The next four are means over all generated tokens, of the model's own distributions before temperature
// and filters; an answer without tokens is an error.
const (
	// ExactMatch is 1 if the answer equals the ground truth, without white space at the ends. Params: case (ignore).
	ExactMatch = "exact_match"
	// NumericMatch is 1 if the last number of the answer equals the ground truth: one number, alone or after ####.
	// Without a ground truth it is the result of the sum, difference or product of two integers in the prompt, such
	// as 347+58=?. Params: scale, a number above 0: an answer that is off by d scores exp(-d/scale) instead of 0.
	NumericMatch = "numeric_match"
	// EntropyMean is the mean entropy, in nats; Confidence is 1 - that / ln V.
	EntropyMean = "entropy_mean"
	Confidence  = "confidence"
	// MaxProbMean is the mean probability of the likeliest token.
	MaxProbMean = "max_prob_mean"
	// TopKMass is the mean probability of the k likeliest tokens together. Params: k, default 5. It needs
	// stored raw logits: topk with at least k, or full.
	TopKMass = "topk_mass"
	// Turns is the score that the interaction gave the answers of a conversation. Params: of: last (that of the last
	// answer), sum or mean (of all answers with a score); default last.
	Turns = "turns"
)

var (
	matchParams   = []string{"case"}
	numericParams = []string{"scale"}
	topKParams    = []string{"k"}
	turnsParams   = []string{"of"}
)

// Text is a sample of a language model, as reward functions get it.
type Text struct {
	// Messages is the conversation, Answer the model's answer to it.
	Messages []Message
	Answer   string
	// TurnScores are the scores that an interaction gave the model's answers, the last one for Answer; nil for an
	// answer without a score.
	TurnScores []*float64
	// Entropies (in nats), TopLogProbs and LogProbs have one number per generated token, of the model's
	// distribution before temperature and filters.
	Entropies, TopLogProbs, LogProbs []float32
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int
	// Trajectory is the subject of the stored sample; its events hold the logits.
	Trajectory string
	// TopLogits returns, for each generated token, the logits of the k likeliest tokens, the largest first, and the
	// log-sum-exp over the whole vocabulary. An error says why they are not stored.
	TopLogits func(ctx context.Context, k int) (logits [][]float32, lse []float32, err error)
}

// Message is one message of a conversation.
type Message struct {
	Role    string `json:"role" msgpack:"role"`
	Content string `json:"content" msgpack:"content"`
}

// textScorer is a built-in reward function of texts.
type textScorer struct {
	name  string
	score func(ctx context.Context, in Input, o textOptions) Result
}

// newTextScorer returns the reward function of texts of that name; nil if there is none.
func newTextScorer(name string) Scorer {
	f := map[string]func(context.Context, Input, textOptions) Result{
		ExactMatch: exactMatch, NumericMatch: numericMatch, EntropyMean: entropyMean, Confidence: confidence,
		MaxProbMean: maxProbMean, TopKMass: topKMass, Turns: turnScores,
	}[name]
	if f == nil {
		return nil
	}
	return textScorer{name, f}
}

func (s textScorer) Name() string { return s.name }

// Version is 2 of numeric_match since it reads 1e3, .5, 1{,}000 and the sign −.
func (s textScorer) Version() string {
	if s.name == NumericMatch {
		return "2"
	}
	return "1"
}

func (s textScorer) Score(ctx context.Context, in Input) (float64, error) {
	r := s.ScoreDetail(ctx, in)
	return r.Value, r.Err
}

// ScoreDetail returns the score with the answer that was compared as the detail.
func (s textScorer) ScoreDetail(ctx context.Context, in Input) Result {
	err := ctx.Err()
	if err == nil && in.Text == nil {
		err = errors.New("no text")
	}
	o, fault := parseTextOptions(in.Params)
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

// textOptions are parsed params of the functions of texts.
type textOptions struct {
	fold  bool
	scale float64 // 0: none
	k     int
	of    string
}

// parseTextOptions parses params. Unknown names and bad values are errors; whether a function has the param is for
// Check.
func parseTextOptions(params map[string]string) (o textOptions, err error) {
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

// exactMatch implements ExactMatch.
func exactMatch(_ context.Context, in Input, o textOptions) Result {
	if in.GroundTruth == "" {
		return Result{Err: errors.New("ground_truth: empty")}
	}
	a, b := strings.TrimSpace(in.Text.Answer), strings.TrimSpace(in.GroundTruth)
	return matchResult(a == b || o.fold && strings.EqualFold(a, b), in.Text.Answer)
}

// matchResult returns 1 if the texts are the same, else 0, with the answer as detail.
func matchResult(same bool, answer string) Result {
	r := Result{Exact: &same, Detail: truncate(strings.TrimSpace(answer))}
	if same {
		r.Value = 1
	}
	return r
}

var (
	numberPattern = regexp.MustCompile(`[-+−]?([0-9][0-9,]*(\.[0-9]+)?|\.[0-9]+)([eE][-+−]?[0-9]+)?`)
	// truthPattern is one number, in what data sets put around one: $18, 18%, \boxed{18}, "18.".
	truthPattern = regexp.MustCompile(`^(?:\\boxed\{|[\s$£€¥=("'\\])*([-+−]?)[\s$£€¥\\]*` +
		`((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:[eE][-+−]?[0-9]+)?)[\s$%.)}"'\\°]*$`)
	// texGroups are the ways of TeX to write the comma between groups of digits: 1{,}000, 10,\!000, 10\,000.
	texGroups  = regexp.MustCompile(`(?:\{,\}|,\\!|\\,)([0-9]{3})`)
	sumPattern = regexp.MustCompile(`(-?[0-9]{1,15})\s*([-+*x×])\s*(-?[0-9]{1,15})\s*=`)
)

// NumericTarget returns the number that an answer should have: the ground truth, which is one number, alone or after
// the last #### of a worked solution, or, without one, the result of the sum in the prompt. A ground truth that is
// anything else is an error: of 1/3 any part that was taken would be another number.
func NumericTarget(prompt, groundTruth string) (float64, error) {
	if groundTruth != "" {
		truth := groundTruth
		if i := strings.LastIndex(truth, "####"); i >= 0 {
			truth = truth[i+len("####"):]
		}
		if m := truthPattern.FindStringSubmatch(texGroups.ReplaceAllString(truth, ",$1")); m != nil {
			if x, err := parseNumber(m[1] + m[2]); err == nil {
				return x, nil
			}
		}
		return 0, fmt.Errorf("ground_truth: %.40q; must be one number such as -1,234.5, 1e3 or $18, alone or after "+
			"####", groundTruth)
	}
	m := sumPattern.FindStringSubmatch(prompt)
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

// lastNumber returns the last number of a text and whether there is one.
func lastNumber(s string) (float64, bool) {
	all := numberPattern.FindAllString(texGroups.ReplaceAllString(s, ",$1"), -1)
	if len(all) == 0 {
		return 0, false
	}
	x, err := parseNumber(all[len(all)-1])
	return x, err == nil
}

// parseNumber reads a number. Commas in it group digits; − (U+2212), which typeset texts have, is a minus.
func parseNumber(s string) (float64, error) {
	return strconv.ParseFloat(strings.NewReplacer(",", "", "−", "-").Replace(s), 64)
}

// UserTexts joins the messages of the user, the newest first: functions look there for the target of an answer.
func UserTexts(messages []Message) string {
	var texts []string
	for _, m := range slices.Backward(messages) {
		if m.Role == "user" {
			texts = append(texts, m.Content)
		}
	}
	return strings.Join(texts, "\n")
}

// numericMatch implements NumericMatch.
func numericMatch(_ context.Context, in Input, o textOptions) Result {
	want, err := NumericTarget(UserTexts(in.Text.Messages), in.GroundTruth)
	if err != nil {
		return Result{Err: err}
	}
	got, ok := lastNumber(in.Text.Answer)
	r := matchResult(ok && got == want, in.Text.Answer)
	if ok && got != want && o.scale > 0 {
		r.Value = math.Exp(-math.Abs(got-want) / o.scale)
	}
	return r
}

// CheckText refuses a function of texts that cannot rate the answers of a prompt. has(k) says why the k largest
// logits of each token are not stored; conversation says whether an interaction scores its turns.
func CheckText(name string, params map[string]string, has func(k int64) error, conversation bool) error {
	o, err := parseTextOptions(params)
	switch {
	case err != nil: // Check reports it
	case name == TopKMass:
		return has(int64(o.k))
	case name == Turns && !conversation:
		return errors.New("text.interaction: null; must be there: it scores the turns")
	}
	return nil
}

// Numbers of tokens that some functions need and not every engine gives.
const (
	Entropies   = "entropies"
	TopLogProbs = "top_log_probs"
)

// NeededNumbers returns which of these a function needs: Entropies, TopLogProbs or "".
func NeededNumbers(name string) string {
	switch name {
	case EntropyMean, Confidence:
		return Entropies
	case MaxProbMean:
		return TopLogProbs
	}
	return ""
}

// errNoTokens is the error for an answer without numbers of tokens.
var errNoTokens = errors.New("the answer has no tokens to take a mean over, or what drew them gave no such numbers")

// tokenMean returns the mean of f over a list with one number per token; an empty list is errNoTokens.
func tokenMean(list []float32, f func(float64) float64) (sum float64, err error) {
	if len(list) == 0 {
		return 0, errNoTokens
	}
	for _, x := range list {
		sum += f(float64(x))
	}
	return sum / float64(len(list)), nil
}

func entropyMean(_ context.Context, in Input, _ textOptions) (r Result) {
	r.Value, r.Err = tokenMean(in.Text.Entropies, func(h float64) float64 { return h })
	return r
}

func confidence(_ context.Context, in Input, _ textOptions) (r Result) {
	if in.Text.Vocabulary < 2 {
		return Result{Err: fmt.Errorf("vocabulary: %d; must be at least 2", in.Text.Vocabulary)}
	}
	most := math.Log(float64(in.Text.Vocabulary))
	r.Value, r.Err = tokenMean(in.Text.Entropies, func(h float64) float64 { return 1 - h/most })
	return r
}

func maxProbMean(_ context.Context, in Input, _ textOptions) (r Result) {
	r.Value, r.Err = tokenMean(in.Text.TopLogProbs, math.Exp)
	return r
}

// turnsOf are the values of the param of of Turns.
var turnsOf = []string{"last", "sum", "mean"}

// turnScores implements Turns. It is an error if no answer has a score, or if the last has none and params.of is last.
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

// topKMass returns the probability of the k likeliest tokens, as a mean over the tokens of the text. A text without
// tokens, and logits that cannot be read, are the error of its score.
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
