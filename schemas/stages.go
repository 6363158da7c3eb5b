package schemas

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// StageSpec is one stage of the samples of a prompt, an ordinary prompt for one lane: what it leaves out is the
// model's. Its texts are templates, in which {prompt}, {metadata.KEY} and {STAGE.text} stand for the prompt's text, an
// entry of its metadata and the newest text that a stage made; {{ and }} are braces.
type StageSpec struct {
	// Name is that of the stage in templates, subjects and events. A later round has a suffix, such as think-2.
	Name Stage `msgpack:"name" form:"token" size:"1..MaxStageName"`
	// Prompt is the template of the text to paint or to answer; of an interaction, what it is told.
	Prompt string `msgpack:"prompt,omitempty" size:"0..MaxPromptBytes" absent:"{prompt}"`
	// Messages is the conversation to answer, in place of Prompt. Each content is a template.
	Messages []Message `msgpack:"messages,omitempty" size:"0..MaxMessages" absent:"the prompt, as a user's message"`
	// Text is how a language model answers.
	Text          *Text `msgpack:"text,omitempty" absent:"as the model does, where it is a language model"`
	ImageSettings `for:"image"`
	Routing
	// Interaction makes the stage in the place of a lane: a judge, a tool or a person, who sees texts and conditions
	// and may end the sample.
	Interaction *Interaction `msgpack:"interaction,omitempty" absent:"a lane makes the stage"`
	// Children is how many samples of this stage each sample of the stage before has. Those of a stage with a tree are
	// its leaves: each sample before has a tree of its own.
	Children *int64 `msgpack:"children,omitempty" range:"1..MaxGroupSize" absent:"1, or the leaves of tree"`
	// Frozen says that the stage is not trained: it has no advantages.
	Frozen bool `msgpack:"frozen,omitempty" default:"false"`
	// Credit is what of the sample's scores the stage is trained for, or each track of its states.
	Credit []CreditShare `msgpack:"credit,omitempty" size:"1..MaxRewards*MaxTracks" absent:"the reward of the sample"`
}

// CreditShare is a weight of one reward function in the reward of a stage, or of a track of it. A list of them is a
// matrix from rewards to tracks. A track that none is for is not trained.
type CreditShare struct {
	// Reward is the name of the function, as reward has it.
	Reward string `msgpack:"reward" form:"reward_name"`
	// Track is the track of the states that it is for, such as video or sound.
	Track string `msgpack:"track,omitempty" form:"token" absent:"all tracks"`
	// Weight is the factor of its score.
	Weight float64 `msgpack:"weight" range:"-MaxWeight..MaxWeight"`
}

// GroupStage is a stage as all events of its group have it.
type GroupStage struct {
	// Name is the stage's.
	Name Stage `msgpack:"name" form:"token"`
	// Kind is text, image, or interaction.
	Kind string `msgpack:"kind" enum:"StageKinds"`
	// Lane makes the stage; of an interaction it is the interaction's name.
	Lane Lane `msgpack:"lane" form:"token"`
	// Tenant is the one whose weights of the lane make it.
	Tenant Tenant `msgpack:"tenant,omitempty" form:"token" absent:"main"`
	// Every is how many samples of the group each sample of the stage leads to: those of the stage have the indices 0,
	// Every, 2 Every and so on.
	Every int64 `msgpack:"every" range:"1..MaxGroupSize"`
	// Tree has the samples of the stage that one sample of the stage before leads to as its leaves.
	Tree *Tree `msgpack:"tree,omitempty"`
	// Frozen says that the stage is not trained, Credit what of the scores it is trained for; absent: the reward.
	Frozen bool          `msgpack:"frozen,omitempty"`
	Credit []CreditShare `msgpack:"credit,omitempty" size:"0..MaxRewards*MaxTracks"`
	// JudgedBy are the reward functions that may judge it: each judges the newest output of a sample that it may.
	JudgedBy []string `msgpack:"judged_by,omitempty" size:"0..MaxRewards" form:"reward_name"`
}

// StageResult is a stage that ran for a sample.
type StageResult struct {
	// Stage is its token: of a later round think-2.
	Stage       Stage `msgpack:"stage" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// TrajectorySeq is the MDR_TRAJECTORIES sequence of its trajectory.
	TrajectorySeq uint64 `msgpack:"trajectory_seq" digest:"-"`
}

// StageScored is what a reward event says of a stage that ran for its sample.
type StageScored struct {
	StageResult
	Lane Lane `msgpack:"lane" form:"token" digest:"-"`
	// ContentDigest is that of its trajectory.
	ContentDigest string `msgpack:"content_digest" form:"digest?"`
	Trained
	// Segments are how many of the trained steps the sample took itself, by the branch points of its tree before them:
	// those before the first, between the first and the second, and so on; absent: it is of no tree.
	Segments []int64 `msgpack:"segments,omitempty" size:"0..MaxBranches+1" range:"0..MaxSteps"`
}

// Place is a stage of a sample.
type Place struct {
	Stage       Stage
	SampleIndex int64
}

// String names the place in a group: 2.think, and 2 where a sample has no stages.
func (p Place) String() string {
	if p.Stage == StageMain {
		return itoa(p.SampleIndex)
	}
	return itoa(p.SampleIndex) + "." + string(p.Stage)
}

// Place returns the stage of the sample.
func (e *Identity) Place() Place { return Place{e.Stage, e.SampleIndex} }

// Facts returns what the rules of a group need to know of the trajectory.
func (e *Trajectory) Facts() Trained {
	x := Trained{
		TrainedSteps: e.TrainedSteps(), ScheduleDigest: e.ScheduleDigest,
		PolicyVersionMin: e.PolicyVersionMin, PolicyVersionMax: e.PolicyVersionMax,
	}
	if e.Text != nil {
		x.Tokens = new(e.Text.Generated())
	}
	return x
}

// AsStage returns what the reward of a sample says of the trajectory, which is at a sequence.
func (e *Trajectory) AsStage(seq uint64) StageScored {
	x := StageScored{
		StageResult: StageResult{Stage: e.Stage, SampleIndex: e.SampleIndex, TrajectorySeq: seq}, Lane: e.Lane,
		ContentDigest: e.ContentDigest, Trained: e.Facts(),
	}
	if tree := e.Group.TreeOf(e.Stage); tree != nil {
		x.Segments = make([]int64, len(tree.Branches)+1)
		for _, k := range e.StochasticSteps() {
			x.Segments[tree.depthOf(k)]++
		}
	}
	return x
}

// Kinds of stages besides KindImage.
const (
	StageText        = "text"
	StageInteraction = "interaction"
)

// StageKinds are all kinds of stages.
var StageKinds = []string{StageText, KindImage, StageInteraction}

// Token returns the stage of a round, from 1, as identity and subjects have it.
func (s Stage) Token(round int64) Stage {
	if round == 1 {
		return s
	}
	return s + Stage("-"+itoa(round))
}

// Split returns the name of a stage and its round, from 1.
func (s Stage) Split() (name Stage, round int64) {
	if i := strings.LastIndexByte(string(s), '-'); i > 0 {
		if n, err := strconv.ParseInt(string(s[i+1:]), 10, 64); err == nil && n > 1 && s[:i].Token(n) == s {
			return s[:i], n
		}
	}
	return s, 1
}

// Name returns that of the stage, whatever its round.
func (s Stage) Name() Stage {
	name, _ := s.Split()
	return name
}

// StageIndex returns which of its stages a name or a token is; -1: none of them.
func (g *Group) StageIndex(of Stage) int {
	name, round := of.Split()
	if round > g.Rounds {
		return -1
	}
	return slices.IndexFunc(g.Stages, func(s GroupStage) bool { return s.Name == name })
}

// EndedBy returns how many samples of the group end with a trajectory: those that no stage comes after. A stage that
// fails, or an interaction that ends its sample, ends all samples that it leads to. So each sample ends once, and the
// sum over a group is the number of its samples, however many stages, rounds and children they had. A sample whose
// next request cannot be made has no such trajectory: its reward alone says that it failed.
func (g *Group) EndedBy(t *Trajectory) int64 {
	i := g.StageIndex(t.Stage)
	if i < 0 {
		return 1
	}
	_, round := t.Stage.Split()
	last := i+1 == len(g.Stages) && round >= g.Rounds
	said := t.Text != nil && t.Text.SaidBy != "" && t.Text.Conversation == ConversationTerminated
	if last || said || t.StopReason != StopCompleted {
		return g.Stages[i].Every
	}
	return 0
}

// MostTrajectories returns how many trajectories a group of a size has at most: one for each sample, or for each of its
// stages.
func (g *Group) MostTrajectories(size int64) (n int64) {
	for _, s := range g.Stages {
		n += size / s.Every * g.Rounds
	}
	return cmp.Or(n, size)
}

// TreeOf returns the tree that the samples of a stage, by its name or token, are leaves of; nil: none.
func (g *Group) TreeOf(stage Stage) *Tree {
	if i := g.StageIndex(stage); i >= 0 {
		return g.Stages[i].Tree
	}
	return g.Tree
}

// IsInteraction reports whether an interaction makes a stage, by its name or token.
func (g *Group) IsInteraction(of Stage) bool {
	i := g.StageIndex(of)
	return i >= 0 && g.Stages[i].Kind == StageInteraction
}

// Trains reports whether the stage has advantages.
func (s *GroupStage) Trains() bool { return !s.Frozen && s.Kind != StageInteraction }

// reservedStages mean something else where stages are named.
var reservedStages = []Stage{StageMain, "prompt", "metadata"}

// AsPrompt returns the stage as the prompt that it is for its lane, without what all stages have in common.
func (s *StageSpec) AsPrompt() *Prompt {
	p := &Prompt{
		Prompt: s.Prompt, Messages: s.Messages, Text: s.Text, ImageSettings: s.ImageSettings, Routing: s.Routing,
	}
	if p.Prompt == "" && len(p.Messages) == 0 {
		p.Prompt = "{prompt}"
	}
	return p
}

// ChildrenOf returns how many samples of stage i each sample of the stage before has.
func (p *Prompt) ChildrenOf(i int) int64 {
	switch s := &p.Stages[i]; {
	case s.Tree != nil:
		return s.Tree.Leaves()
	case s.Children != nil:
		return *s.Children
	}
	return 1
}

// EveryOf returns how many samples of the group each sample of stage i leads to.
func (p *Prompt) EveryOf(i int) int64 {
	n := int64(1)
	for k := i + 1; k < len(p.Stages) && n <= MaxGroupSize; k++ {
		n *= max(1, p.ChildrenOf(k))
	}
	return n
}

// MostRounds returns how often the stages run at most.
func (p *Prompt) MostRounds() int64 {
	if p.Rounds == nil {
		return 1
	}
	return *p.Rounds
}

// checkStages checks the stages of a prompt, and that nothing is said of stages where there are none.
func (p *Prompt) checkStages(f *faults) {
	if len(p.Stages) == 0 {
		p.checkNoStages(f)
		return
	}
	if len(p.Stages) > MaxStages {
		return
	}
	lane := Fields(reflect.TypeFor[StageSpec]())
	for _, field := range setFields(p, func(f *Field) bool {
		return f.Name != "prompt" && f.Name != "priority" &&
			slices.ContainsFunc(lane, func(o Field) bool { return o.Name == f.Name })
	}) {
		f.add(field, "given", "must be absent beside stages: give it to the stage that it is for")
	}
	if n := p.groupSize(); n > 0 && n <= MaxGroupSize {
		if every := p.EveryOf(-1); n%every != 0 {
			f.add("group_size", strconv.FormatInt(n, 10), fmt.Sprintf("must be a multiple of %d, the children of all "+
				"stages: it is the number of samples of the last one", every))
		}
		if all := n * int64(len(p.Stages)) * p.MostRounds(); all > MaxStageSamples {
			f.add("group_size", strconv.FormatInt(n, 10), fmt.Sprintf("must be at most %d with %d stages in %d rounds",
				MaxStageSamples/int64(len(p.Stages))/p.MostRounds(), len(p.Stages), p.MostRounds()))
		}
	} else if every := p.EveryOf(-1); p.GroupSize == nil && p.Samples()%every != 0 {
		f.add("group_size", "absent", fmt.Sprintf("must be a multiple of %d, the children of all stages", every))
	}
	for i := range p.Stages {
		p.checkStage(f.inItem("stages", i), i)
	}
	for i, r := range p.Reward {
		if r.Stage != "" {
			f.inItem("reward", i).checkStageNamed(r.Stage, p.Stages)
		}
	}
}

// checkCredit checks a matrix from rewards to tracks.
func (f *faults) checkCredit(list []CreditShare, rewards []RewardSpec) {
	if len(list) > MaxRewards*MaxTracks {
		return
	}
	for k, c := range list {
		g := f.inItem("credit", k)
		if c.Weight == 0 {
			g.add("weight", "0, or absent", "must be another number: leave out a reward that does not count")
		}
		switch {
		case slices.ContainsFunc(list[:k], func(o CreditShare) bool {
			return o.Reward == c.Reward && (o.Track == c.Track || o.Track == "" || c.Track == "")
		}):
			g.add("reward", quote(c.Reward), "must come at most once for a track")
		case !slices.ContainsFunc(rewards, func(r RewardSpec) bool { return r.Name == c.Reward }):
			g.add("reward", quote(c.Reward), "must be one of the prompt's reward")
		}
	}
}

// checkNoStages refuses what is for stages in a prompt without any.
func (p *Prompt) checkNoStages(f *faults) {
	const rule = "must be absent without stages"
	f.checkCredit(p.Credit, p.Reward)
	switch {
	case len(p.Credit) == 0:
	case !slices.ContainsFunc(p.Credit, func(c CreditShare) bool { return c.Track != "" }):
		f.add("credit", "no track", "must name one without stages: what whole samples are trained for is reward")
	case p.Tree != nil:
		f.add("credit", "given", "must be absent beside tree, whose steps have one advantage for all tracks")
	}
	if p.Rounds != nil {
		f.add("rounds", strconv.FormatInt(*p.Rounds, 10), rule)
	}
	for i, r := range p.Reward {
		if r.Stage != "" {
			f.inItem("reward", i).add("stage", quote(string(r.Stage)), rule)
		}
	}
	for i, c := range p.Conditions {
		if c.Stage != "" {
			f.inItem("conditions", i).add("stage", quote(string(c.Stage)), rule)
		}
	}
}

// checkStage checks stage i: its name, and its settings as those of a prompt.
func (p *Prompt) checkStage(f *faults, i int) {
	s := &p.Stages[i]
	switch name, round := s.Name.Split(); {
	case slices.Contains(reservedStages, s.Name):
		f.add("name", quote(string(s.Name)), "must be another: this one has its meaning already")
	case round > 1:
		f.add("name", quote(string(s.Name)),
			fmt.Sprintf("must not end in a number: so does round %d of stage %s", round, name))
	case slices.ContainsFunc(p.Stages[:i], func(o StageSpec) bool { return o.Name == s.Name }):
		f.add("name", quote(string(s.Name)), "must come at most once")
	}
	if i == 0 && s.Interaction != nil {
		f.add("interaction", "given", "must be absent of the first stage: there is nothing to say something to")
	}
	switch n := p.ChildrenOf(i); {
	case s.Tree != nil && s.Children != nil:
		f.add("children", strconv.FormatInt(*s.Children, 10), "must be absent beside tree, whose leaves they are")
	case n > 1 && i == 0 && s.Tree == nil:
		f.add("children", strconv.FormatInt(n, 10),
			"must be absent of the first stage: group_size says how many there are")
	case n > 1 && p.MostRounds() > 1:
		field, value := "children", strconv.FormatInt(n, 10)
		if s.Tree != nil {
			field, value = "tree", s.Tree.formatWidths()
		}
		f.add(field, value, "must be absent beside rounds, each of which would have as many "+
			"again: name the stages of each round instead")
	}
	if s.Frozen && len(s.Credit) > 0 {
		f.add("credit", "given", "must be absent beside frozen: the stage is not trained")
	}
	f.checkCredit(s.Credit, p.Reward)
	for k, c := range s.Conditions {
		if c.Stage == "" {
			continue
		}
		g := f.inItem("conditions", k)
		g.checkStageNamed(c.Stage, p.Stages)
		if c.Data != nil || c.Ref != nil {
			g.add("stage", quote(string(c.Stage)), "must be the only one of stage, data and ref")
		}
	}
	if s.Interaction != nil {
		s.checkInteraction(f)
		return
	}
	if s.ScheduledSampling != nil {
		f.add("scheduled_sampling", "given", "must be absent in a stage, which makes an output, and not latents alone")
	}
	if s.Tree != nil && s.Tree.Leaf != nil {
		f.inStruct("tree").add("leaf", "given", "must be absent in a stage, whose samples are all leaves")
	}
	if s.Start != nil && s.Start.Data != nil && len(s.Start.Data.Images) > 1 {
		f.inStruct("start").inStruct("data").add("images", strconv.Itoa(len(s.Start.Data.Images))+" items",
			"must be one in a stage, for all of its samples")
	}
	if s.Stop != nil && !s.Stop.Decode {
		f.inStruct("stop").add("decode", "false", "must be true in a stage: what judges it, or comes after, sees it")
	}
	q := s.AsPrompt()
	q.Conditions = slices.Clone(q.Conditions)
	for k := range q.Conditions { // a file that another stage makes is as good as a given one
		if c := &q.Conditions[k]; c.Stage != "" {
			c.Stage, c.Ref, c.Data = "", &Ref{}, nil
		}
	}
	q.checkRules(f)
}

// checkInteraction checks a stage that an interaction makes: it has a prompt and conditions alone.
func (s *StageSpec) checkInteraction(f *faults) {
	const rule = "must be absent beside interaction, which no lane makes"
	for _, field := range setFields(s, func(f *Field) bool {
		return !slices.Contains([]string{"name", "prompt", "conditions", "interaction", "children"}, f.Name)
	}) {
		f.add(field, "given", rule)
	}
	if s.Interaction.MaxTurns != nil {
		f.inStruct("interaction").add("max_turns", strconv.FormatInt(*s.Interaction.MaxTurns, 10),
			"must be absent in a stage: rounds says how often it runs")
	}
	for i, c := range s.Conditions {
		if c.Stage == "" {
			f.inItem("conditions", i).add("stage", quote(""), "must name the stage that made the file")
		}
		if slices.ContainsFunc(s.Conditions[:i], func(o Condition) bool { return o.Name == c.Name }) {
			f.inItem("conditions", i).add("name", quote(c.Name), "must come at most once")
		}
	}
}

// checkStageNamed refuses the name of a stage that is not there.
func (f *faults) checkStageNamed(name Stage, list []StageSpec) {
	if slices.ContainsFunc(list, func(s StageSpec) bool { return s.Name == name && s.Interaction == nil }) {
		return
	}
	names := make([]string, 0, len(list))
	for _, s := range list {
		if s.Interaction == nil {
			names = append(names, string(s.Name))
		}
	}
	f.add("stage", quote(string(name)), "must be one of "+strings.Join(names, ", "))
}

// checkStages checks that the stages of a group make a tree whose leaves are its samples.
func (g *Group) checkStages(f *faults, groupSize int64) {
	if len(g.Stages) == 0 {
		if g.Rounds != 0 {
			f.add("rounds", strconv.FormatInt(g.Rounds, 10), "must be absent without stages")
		}
		return
	}
	if g.Rounds < 1 {
		f.checkWithin("rounds", g.Rounds, 1, MaxRounds)
	}
	before := groupSize
	for i, s := range g.Stages {
		of := f.inItem("stages", i)
		if slices.ContainsFunc(g.Stages[:i], func(o GroupStage) bool { return o.Name == s.Name }) {
			of.add("name", quote(string(s.Name)), "must come at most once")
		}
		if s.Every >= 1 && before%s.Every != 0 || s.Every != 1 && i == len(g.Stages)-1 {
			of.add("every", strconv.FormatInt(s.Every, 10),
				"must divide that of the stage before, and be 1 of the last")
		}
		if s.Tree != nil {
			if n := s.Tree.checkBranches(of.inStruct("tree"), MaxSteps); n > 0 && before%(n*max(1, s.Every)) != 0 {
				of.add("tree", s.Tree.formatWidths()+" leaves", "must be the samples that one of the stage before has")
			}
		}
		before = max(1, s.Every)
	}
}

// checkStage checks that an event is of a stage of its group: main where the group has none, else one that has a sample
// of that index.
func (e *Identity) checkStage(f *faults, g *Group) {
	if len(g.Stages) == 0 {
		return
	}
	i := g.StageIndex(e.Stage)
	switch {
	case i < 0:
		f.add("stage", quote(string(e.Stage)), "must be one of the group's stages")
	case g.Stages[i].Every > 0 && e.SampleIndex%g.Stages[i].Every != 0:
		f.add("sample_index", strconv.FormatInt(e.SampleIndex, 10), fmt.Sprintf("must be a multiple of %d in stage %s",
			g.Stages[i].Every, e.Stage))
	}
}

// seesFiles returns the field of files that a stage of text may have: one that an interaction makes.
func (e *Identity) seesFiles(g *Group) []string {
	if g.IsInteraction(e.Stage) {
		return []string{"conditions"}
	}
	return nil
}

// checkSaid checks a text that an interaction said: one turn, without tokens.
func (e *TextResult) checkSaid(f *faults) {
	if n := len(e.Tensors()); n > 0 {
		f.add("tensors", strconv.Itoa(n), "must be absent beside said_by: an interaction has no tokens")
	}
	if !f.requireLength("turns", len(e.Turns), 1, "what the interaction said") {
		return
	}
	if t := e.Turns[0]; !t.Generated || t.Begin != 0 || t.End != 0 {
		f.inItem("turns", 0).add("end", strconv.FormatInt(t.End, 10), "must be 0, of a generated turn without tokens")
	}
}
