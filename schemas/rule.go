package schemas

import "slices"

// Rule is what is true of a rule: what a run should not do. Package rules looks for it in what is stored.
type Rule struct {
	Name string `json:"name"`
	// Limit is that of a run whose prompts name no other; Of says what it is of.
	Limit float64 `json:"limit"`
	Of    string  `json:"of"`
	// Fix is what a person may do about it.
	Fix string `json:"fix"`
}

// Rules are all there are. Not to be modified.
var Rules = []Rule{
	{
		RuleReader, 0.05,
		"the share of its best by which a function that is not rewarded falls, while the reward is not below what it " +
			"was then",
		"Look at the best samples: what is rewarded may be gamed. Give that function a weight, or hold the weights " +
			"closer to the reference",
	},
	{
		RuleDiversity, 0.3, "the share of its start by which diversity falls, of texts entropy_mean",
		"Reward diversity too, take smaller steps, or more noise",
	},
	{
		RuleVariance, 0.7, "the share of groups whose rewards are all equal",
		"Choose harder or easier prompts, larger groups, a reward with more values, or --zero-std refill",
	},
	{
		RuleStale, 4, "the versions that the samples of an update are behind",
		"Publish less ahead, or add samplers",
	},
	{
		RuleRatio, 0.1, "the distance from 1 of the mean ratio of an update",
		"Take smaller steps, or fewer for each batch; at the first step the ratio is 1, or the weights differ",
	},
	{
		RuleClip, 0.5, "the share of ratios that an update clips",
		"Take smaller steps, or fewer for each batch",
	},
	{
		RuleKL, 1, "the divergence from the reference in an update, in nats",
		"Raise the weight of the divergence, or take smaller steps",
	},
	{
		RuleWeights, 3, "the updates in a row that leave the weights as they were, or have no gradient",
		"See whether the adapter is trained at all: requires_grad, the optimizer's parameters, advantages that are 0",
	},
}

// The names of rules.
const (
	RuleReader    = "reader"
	RuleDiversity = "diversity"
	RuleVariance  = "variance"
	RuleStale     = "stale"
	RuleRatio     = "ratio"
	RuleClip      = "clip"
	RuleKL        = "kl"
	RuleWeights   = "weights"
)

// What happens when a run breaks a rule.
const (
	RuleTell  = "tell"
	RulePause = "pause"
	RuleOff   = "off"
)

// RuleNamed returns the rule of a name.
func RuleNamed(name string) Rule {
	i := slices.IndexFunc(Rules, func(r Rule) bool { return r.Name == name })
	if i < 0 {
		return Rule{Name: name}
	}
	return Rules[i]
}

func namesOfRules() (names []string) {
	for _, r := range Rules {
		names = append(names, r.Name)
	}
	return names
}

// RuleSpec changes a rule for a run.
type RuleSpec struct {
	// Name is the rule's.
	Name string `msgpack:"name" enum:"RuleNames"`
	// Limit is what the run should not go beyond, in the rule's unit.
	Limit *float64 `msgpack:"limit,omitempty" range:"0..MaxWeight" absent:"the rule's"`
	// Action says what happens then: tell, an alarm is stored and shown; pause, the run is paused, too; or off.
	Action string `msgpack:"action,omitempty" enum:"RuleActions" default:"tell"`
}

// Alarm says that a run breaks a rule. It is stored once for each run and rule.
type Alarm struct {
	V   int64 `msgpack:"v"`
	Run Run   `msgpack:"run" form:"token"`
	// Rule names what the run should not do.
	Rule string `msgpack:"rule" form:"token"`
	// Of is what breaks it: a reward function, or a trainer with its lane and tenant; absent: the groups.
	Of string `msgpack:"of,omitempty" size:"0..MaxName,cut"`
	// Value is what was found, in the unit of the rule, and beyond Limit.
	Value float64 `msgpack:"value"`
	// Limit is that of the run.
	Limit float64 `msgpack:"limit"`
	// Says says it in a sentence, for people.
	Says string `msgpack:"says" size:"1..MaxText,cut"`
	// Paused says that the run was paused for it.
	Paused bool `msgpack:"paused,omitempty"`
	// At is when it was found, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// Type returns the type name of the event.
func (*Alarm) Type() string { return TypeAlarm }

// Validate returns all faults of the alarm, joined.
func (e *Alarm) Validate() error { return CheckFields(e) }

// Subject returns the subject of the alarm: its run and rule name it.
func (e *Alarm) Subject() string { return Prefix + KindAlarm + "." + string(e.Run) + "." + e.Rule }
