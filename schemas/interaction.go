package schemas

import (
	"strconv"
	"time"
)

// Interaction is who answers the model between its turns, so that it can try again.
type Interaction struct {
	// Name is sums, which is built in, or the queue group of the workers that answer on mdr.v1.interact.NAME.
	Name string `msgpack:"name" form:"token" flag:"interaction"`
	// MaxTurns is the most answers of the model.
	MaxTurns *int64 `msgpack:"max_turns,omitempty" range:"1..MaxAnswers" default:"3" flag:"max-turns"`
	// TimeoutMS is how long a worker may take to respond to one answer. Then the sample fails.
	TimeoutMS *int64 `msgpack:"timeout_ms,omitempty" range:"1..MaxInteractMS" default:"30000" unit:"milliseconds" flag:"interaction-timeout" digest:"-"`
	// Params are options of the interaction by name, handed on unread; sums has none.
	Params map[string]string `msgpack:"params,omitempty" size:"0..MaxParams" flag:"interaction-params"`
}

// Answers returns the most answers that a sample of text can have.
func (e *TextRequest) Answers() int64 {
	if e.Interaction == nil || e.Interaction.MaxTurns == nil {
		return 1
	}
	return *e.Interaction.MaxTurns
}

// Timeout returns how long a worker may take for one reply.
func (e *Interaction) Timeout() time.Duration {
	return time.Duration(*e.TimeoutMS) * time.Millisecond
}

// checkResolved checks that nothing is left to a default.
func (e *Interaction) checkResolved(f *faults) {
	if e == nil {
		return
	}
	if e.MaxTurns == nil {
		f.add("max_turns", "null", "must be there")
	}
	if e.TimeoutMS == nil {
		f.add("timeout_ms", "null", "must be there")
	}
}

// InteractRequest asks what an interaction says to an answer: a core NATS request on InteractSubject(NAME), which the
// queue group NAME hands to one worker. It is not stored. All that was said before is in it: a worker need not
// remember.
type InteractRequest struct {
	V int64 `msgpack:"v"`
	// Name is the interaction's, Params are the prompt's for it.
	Name   string            `msgpack:"name" form:"token"`
	Params map[string]string `msgpack:"params"`
	// Run to Attempt name the sample.
	Run         Run    `msgpack:"run" form:"token"`
	UID         UID    `msgpack:"uid" form:"token"`
	SampleIndex int64  `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	Stage       Stage  `msgpack:"stage" form:"token"`
	Attempt     string `msgpack:"attempt" form:"token"`
	// Answer is which of the model's answers it is, from 0; it has MaxTurns of them at most.
	Answer   int64 `msgpack:"answer" range:"0..MaxAnswers-1"`
	MaxTurns int64 `msgpack:"max_turns" range:"1..MaxAnswers"`
	// Messages is the conversation up to the answer, which is its last message.
	Messages []Message `msgpack:"messages" size:"1..MaxMessages+2*MaxAnswers"`
	// FinishReason is why the answer ended: stop or length.
	FinishReason string `msgpack:"finish_reason" enum:"FinishReasons"`
	// GroundTruth comes from the first reward function that has one, Metadata from the prompt.
	GroundTruth Truth    `msgpack:"ground_truth" size:"0..MaxPromptBytes"`
	Metadata    Metadata `msgpack:"metadata,omitempty"`
	// IDs to Entropies are of the answer's tokens, as in Tokens. Of answers of more than MaxInteractTokens tokens they
	// are empty: Events has them; so are those numbers that a server which draws the tokens does not give.
	IDs []int64 `msgpack:"ids" size:"0..MaxInteractTokens" range:"0..MaxVocabulary-1"`
	// LogProbs are before temperature and filters, in nats, ProcessedLogProbs after them; LogSumExps of all logits of
	// LogitsKind.
	LogProbs          []float32 `msgpack:"log_probs" size:"0..MaxInteractTokens" range:"..0,null"`
	ProcessedLogProbs []float32 `msgpack:"processed_log_probs" size:"0..MaxInteractTokens" range:"..0,null"`
	LogSumExps        []float32 `msgpack:"log_sum_exps" size:"0..MaxInteractTokens"`
	Entropies         []float32 `msgpack:"entropies" size:"0..MaxInteractTokens" range:"0.."`
	// LogitsForm is the form of the logits that are stored of the answer; absent: there are none. Logits are these;
	// absent: they are more than a message takes along, and Events has them. Vocabulary is V, the columns of form full.
	LogitsForm string       `msgpack:"logits_form,omitempty" enum:"LogitsForms?"`
	Logits     *TokenLogits `msgpack:"logits,omitempty"`
	Vocabulary int64        `msgpack:"vocabulary,omitempty" range:"0..MaxVocabulary"`
	// LogitsKind is raw, as the model gives them, or processed: after temperature and filters.
	LogitsKind string `msgpack:"logits_kind" enum:"LogitsKinds"`
	// Events is the filter of the attempt's events in MDR_STEPS. Those of the answer have FirstEvent as their n, and
	// the EventCount-1 after it; they are stored.
	Events     string `msgpack:"events" size:"0..MaxSubject"`
	FirstEvent int64  `msgpack:"first_event" range:"0..MaxTokenEvents"`
	EventCount int64  `msgpack:"event_count" range:"0..MaxTokenEvents"`
	// Conditions are the files that a stage which the interaction makes is shown, such as the image of an earlier one,
	// sorted by name. Such a stage has no tokens: Messages is what it is told, MaxTurns the rounds.
	Conditions []ScoreCondition `msgpack:"conditions,omitempty" size:"0..MaxConditioning"`
}

// InteractReply is what an interaction says to an answer, at most MaxInteractReply bytes.
type InteractReply struct {
	V int64 `msgpack:"v"`
	// Terminate ends the conversation; Content is then kept, and not said.
	Terminate bool `msgpack:"terminate,omitempty"`
	// Content is what the model is to answer next, a user's message; not empty, unless Terminate or Error.
	Content string `msgpack:"content,omitempty" size:"0..MaxPromptBytes"`
	// Score is the answer's, a finite number; absent: it has none.
	Score *float64 `msgpack:"score,omitempty"`
	// Metadata is stored with the answer.
	Metadata Metadata `msgpack:"metadata,omitempty"`
	// Error says why there is no answer; with Retry it may pass, and is asked again while there is time.
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	Retry bool   `msgpack:"retry,omitempty"`
}

// Type returns the type name of the event.
func (*InteractRequest) Type() string { return TypeInteractRequest }

// Type returns the type name of the event.
func (*InteractReply) Type() string { return TypeInteractReply }

// checkRules checks that logits beside the question are those of the answer's tokens.
func (e *InteractRequest) checkRules(f *faults) {
	switch {
	case e.Logits == nil || e.LogitsForm == "":
	case e.Logits.Form != e.LogitsForm:
		f.add("logits.form", quote(e.Logits.Form), "must be logits_form, "+quote(e.LogitsForm))
	case len(e.IDs) > 0:
		e.Logits.checkValues(f.inStruct("logits"), int64(len(e.IDs)), e.Vocabulary, e.LogitsKind)
	}
}

func (e *InteractReply) checkRules(f *faults) {
	if e.Error == "" && !e.Terminate {
		f.requireText("content", e.Content)
	}
	if e.Error == "" && e.Retry {
		f.add("retry", "true", "must be absent without an error")
	}
}

// Messages returns the conversation before the last answer: the messages of the prompt, and each earlier answer with
// the interaction's reply to it.
func (e *TextResult) Messages() []Message {
	list := append([]Message(nil), e.Settings.Messages...)
	for i, t := range e.Turns {
		if t.Generated && i < len(e.Turns)-1 {
			list = append(list, Message{RoleAssistant, t.Text}, Message{RoleUser, t.Reply})
		}
	}
	return list
}

// checkTurns checks the turns of a completed sample: given and generated turns alternate, and answers, replies and the
// conversation's end fit the interaction that was asked for.
func (e *TextResult) checkTurns(f *faults) {
	with, answers := e.Settings.Interaction != nil, int64(0)
	for i, t := range e.Turns {
		g := f.inItem("turns", i)
		if t.Generated != (i%2 == 1) {
			g.add("generated", strconv.FormatBool(t.Generated), "must be "+strconv.FormatBool(i%2 == 1)+
				": what was given and what was generated take turns")
			return
		}
		if t.Generated {
			answers++
		}
		if (!with || !t.Generated) && (t.Score != nil || t.Reply != "" || len(t.Metadata) > 0) {
			g.add("reply", quote(t.Reply),
				"must be absent, as score and metadata, unless an interaction says it to what was generated")
		}
	}
	most := e.Settings.Answers()
	switch {
	case len(e.Turns)%2 != 0 || answers < 1 || answers > most:
		f.add("turns", strconv.Itoa(len(e.Turns)), "must be 1 to "+strconv.FormatInt(most, 10)+
			" answers, each behind what was given")
	case !with && e.Conversation != "":
		f.add("conversation", quote(e.Conversation), "must be absent without an interaction")
	case with && !conversationEnded(e.Conversation):
		f.add("conversation", quote(e.Conversation), "must be terminated, max_turns or context when completed")
	case e.Conversation == ConversationMaxTurns && answers < most:
		f.add("conversation", quote(e.Conversation), "must be another: "+strconv.FormatInt(answers, 10)+" of "+
			strconv.FormatInt(most, 10)+" answers were given")
	}
}

// conversationEnded reports whether a conversation state means that it ended regularly, not by a fault.
func conversationEnded(state string) bool {
	return state == ConversationTerminated || state == ConversationMaxTurns || state == ConversationContext
}
