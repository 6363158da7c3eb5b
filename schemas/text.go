package schemas

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Message is one message of a conversation.
type Message struct {
	// Role is the author of the message: system, user or assistant.
	Role string `json:"role" msgpack:"role" enum:"Roles"`
	// Content is its text, UTF-8; the last message of a prompt, which the model answers, has MaxPromptBytes at most.
	Content string `json:"content" msgpack:"content" size:"0..MaxAnswerBytes"`
}

// Text is how a language model answers. Of an empty one everything is the model's.
type Text struct {
	// MaxNewTokens is the most tokens of an answer; 0: it is empty.
	MaxNewTokens *int64 `msgpack:"max_new_tokens,omitempty" range:"0..MaxTokens-1" absent:"the model's" flag:"max-new-tokens"`
	// Temperature divides the logits before a token is drawn; 0 takes the likeliest, all others are at least 0.001.
	Temperature *float64 `msgpack:"temperature,omitempty" range:"0..MaxTemperature" absent:"the model's" flag:"temperature"`
	// TopK leaves the k likeliest tokens to draw from; 0: all.
	TopK *int64 `msgpack:"top_k,omitempty" range:"0..MaxVocabulary" absent:"the model's" flag:"top-k"`
	// TopP leaves the likeliest tokens, as many as it takes to have this much probability; 1: all.
	TopP *float64 `msgpack:"top_p,omitempty" range:"(0..1]" absent:"the model's" flag:"top-p"`
	// MinP leaves the tokens with at least this share of the probability of the likeliest; 0: all.
	MinP *float64 `msgpack:"min_p,omitempty" range:"0..1" absent:"the model's" flag:"min-p"`
	// Stop are texts that end an answer where they appear in it, wherever its tokens begin and end.
	Stop []string `msgpack:"stop,omitempty" size:"0..MaxStops,unique" flag:"stop"`
	// StopTokenIDs are tokens that end an answer, beside the model's own.
	StopTokenIDs []int64 `msgpack:"stop_token_ids,omitempty" size:"0..MaxStops,unique" range:"0..MaxVocabulary-1" flag:"stop-token-ids"`
	// Logits chooses the logits that are stored of each generated token.
	Logits *Logits `msgpack:"logits,omitempty" absent:"none; log-probs, log-sum-exp and entropy are always there" flag:"logits"`
	// Interaction is who answers the model, so that it can go on.
	Interaction *Interaction `msgpack:"interaction,omitempty" absent:"nobody; the model answers once"`
	// ChatTemplateKwargs are further variables of the chat template, texts, as transformers takes them. The one named
	// strftime_now is the day, such as 2026-11-28, that the template's function of that name gives; without it that is
	// the day, of UTC, on which the prompt was stored.
	ChatTemplateKwargs map[string]string `msgpack:"chat_template_kwargs,omitempty" size:"0..MaxParams"`
	// TokensPerEvent is how many tokens one event has; a turn's last may have fewer.
	TokensPerEvent *int64 `msgpack:"tokens_per_event,omitempty" range:"1..MaxTokensPerEvent" default:"1" flag:"tokens-per-event"`
}

// Logits say which of a token's logits are stored, and how.
type Logits struct {
	// Form is none, topk (the K largest), ids (the tokens of IDs) or full (all of the vocabulary).
	Form string `msgpack:"form,omitempty" enum:"LogitsForms" default:"none"`
	// K is how many topk has.
	K *int64 `msgpack:"k,omitempty" range:"1..MaxTopLogits" absent:"20, of topk"`
	// IDs are the tokens of the form ids.
	IDs []int64 `msgpack:"ids,omitempty" size:"0..MaxTopLogits,unique" range:"0..MaxVocabulary-1"`
	// DType is how they are stored. A logit that it cannot hold fails the sample: it is never clamped.
	DType string `msgpack:"dtype,omitempty" enum:"LatentsDTypes" default:"F32"`
	// Kind is raw, as the model gives them, or processed: divided by the temperature, and -inf where
	// top_k, top_p or min_p leave a token out.
	Kind string `msgpack:"kind,omitempty" enum:"LogitsKinds" default:"raw"`
	// Answers are the answers of a conversation whose logits are stored, from 0.
	Answers []int64 `msgpack:"answers,omitempty" size:"0..MaxAnswers,unique" range:"0..MaxAnswers-1" absent:"all"`
}

// TextRequest is the Text of a prompt, resolved.
type TextRequest struct {
	// Messages is the conversation to answer.
	Messages []Message `msgpack:"messages" size:"1..MaxMessages" digest:"content"`
	// MaxNewTokens bounds the tokens of an answer. So does the context of the model.
	MaxNewTokens int64   `msgpack:"max_new_tokens" range:"0..MaxTokens-1"`
	Temperature  float64 `msgpack:"temperature" range:"0..MaxTemperature"`
	TopK         int64   `msgpack:"top_k" range:"0..MaxVocabulary"`
	TopP         float64 `msgpack:"top_p" range:"(0..1]"`
	MinP         float64 `msgpack:"min_p" range:"0..1"`
	// Stop and StopTokenIDs end an answer, beside the tokens with which the model ends its turn.
	Stop         []string `msgpack:"stop" size:"0..MaxStops,unique"`
	StopTokenIDs []int64  `msgpack:"stop_token_ids" size:"0..MaxStops,unique" range:"0..MaxVocabulary-1"`
	// Logits are the stored ones; absent: none.
	Logits *Logits `msgpack:"logits,omitempty" digest:"-"`
	// Interaction is what replies to the model; absent: nothing does, and it answers once.
	Interaction    *Interaction `msgpack:"interaction,omitempty"`
	TokensPerEvent int64        `msgpack:"tokens_per_event" range:"1..MaxTokensPerEvent" digest:"-"`
	// ChatTemplateKwargs are the variables of the chat template that the prompt gives; and strftime_now, the day, where
	// the template asks for it.
	ChatTemplateKwargs map[string]string `msgpack:"chat_template_kwargs,omitempty" size:"0..MaxParams"`
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int64 `msgpack:"vocabulary" range:"1..MaxVocabulary"`
}

// TextPolicy is what a lane that serves a language model takes.
type TextPolicy struct {
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int64 `msgpack:"vocabulary" range:"1..MaxVocabulary"`
	// MaxTokens bounds a prompt together with its answer.
	MaxTokens int64 `msgpack:"max_tokens" range:"1..MaxTokens"`
	// MaxNewTokens to MinP are for prompts that leave them out.
	MaxNewTokens int64   `msgpack:"max_new_tokens" range:"0..MaxTokens-1"`
	Temperature  float64 `msgpack:"temperature" range:"0..MaxTemperature"`
	TopK         int64   `msgpack:"top_k" range:"0..MaxVocabulary"`
	TopP         float64 `msgpack:"top_p" range:"(0..1]"`
	MinP         float64 `msgpack:"min_p" range:"0..1"`
	// Engine draws the tokens; absent: the sampler does.
	Engine *Engine `msgpack:"engine,omitempty"`
	// Dated says that the chat template asks for the day, by strftime_now.
	Dated bool `msgpack:"dated,omitempty"`
}

// StrftimeNow is the variable of a chat template that is the day.
const StrftimeNow = "strftime_now"

// checkTemplate checks that the variables of the chat template are not those that it gets anyway.
func (e *Text) checkTemplate(f *faults) {
	for _, name := range []string{"messages", "tools", "documents", "add_generation_prompt"} {
		if _, ok := e.ChatTemplateKwargs[name]; ok {
			f.add("chat_template_kwargs."+name, "given", "must be absent: the template has it already")
		}
	}
	if day, ok := e.ChatTemplateKwargs[StrftimeNow]; ok {
		if _, err := time.Parse(time.DateOnly, day); err != nil {
			f.add("chat_template_kwargs."+StrftimeNow, quote(day), "must be a day, such as 2026-11-28")
		}
	}
}

// TextResult is what a sample of text came to.
type TextResult struct {
	// Settings is how it was asked for.
	Settings TextRequest `msgpack:"settings"`
	// IDs [n], I32, is the whole sequence: the prompt in its template, and the generated tokens, with the one that
	// ended them. This and what follows is absent unless completed.
	IDs *Tensor `msgpack:"ids,omitempty"`
	// Mask [n], U8, is 1 where a token was generated: what there is to train on.
	Mask *Tensor `msgpack:"mask,omitempty"`
	// LogProbs [n], F32, are before temperature and filters, in nats; 0 where Mask is.
	LogProbs *Tensor `msgpack:"log_probs,omitempty"`
	// ProcessedLogProbs [n], F32, drew the tokens: they are after temperature and filters.
	ProcessedLogProbs *Tensor `msgpack:"processed_log_probs,omitempty"`
	// Entropies [n], F32, are of the distributions that LogProbs come from, in nats.
	Entropies *Tensor `msgpack:"entropies,omitempty"`
	// TopLogProbs [n], F32, are of the likeliest tokens, by the distributions that LogProbs come from.
	TopLogProbs *Tensor `msgpack:"top_log_probs,omitempty"`
	// Turns are the parts of the sequence, in order.
	Turns []Turn `msgpack:"turns,omitempty" size:"0..MaxTurns"`
	// Conversation is how that with the interaction ended: terminated, max_turns or context; of a sample that failed
	// for it timeout, absent, error or garbage. Without an interaction it is absent.
	Conversation string `msgpack:"conversation,omitempty" enum:"ConversationStates?"`
	// SaidBy is the interaction that said the text, which has no tokens then; absent: a model generated it.
	SaidBy string `msgpack:"said_by,omitempty" form:"token"`
}

// Turn is the part of a sequence that one participant said. Given parts may be of several.
type Turn struct {
	// Begin and End are its tokens, [begin, end).
	Begin int64 `msgpack:"begin" range:"0..MaxTokens"`
	End   int64 `msgpack:"end" range:"0..MaxTokens"`
	// Generated says that the model made it; else it was given.
	Generated bool `msgpack:"generated"`
	// FinishReason is why a turn that was generated ended: stop or length.
	FinishReason string `msgpack:"finish_reason,omitempty" enum:"FinishReasons?"`
	// Matched is the text of Stop that ended it; absent: none did.
	Matched string `msgpack:"matched,omitempty" size:"0..MaxPromptBytes"`
	// Text is its text, without the tokens of the template and without the one that ended it. A given turn has none:
	// the messages of the settings have it, or the reply to the turn before.
	Text string `msgpack:"text,omitempty" size:"0..MaxAnswerBytes"`
	// Score, Reply and Metadata are the interaction's response to a generated turn. The model did not see a reply to
	// the last turn.
	Score    *float64 `msgpack:"score,omitempty"`
	Reply    string   `msgpack:"reply,omitempty" size:"0..MaxPromptBytes"`
	Metadata Metadata `msgpack:"metadata,omitempty"`
}

// Tensors returns the tensors that the result has, with their wire names.
func (e *TextResult) Tensors() []NamedTensor {
	var list []NamedTensor
	for _, t := range []struct {
		name   string
		tensor *Tensor
	}{
		{"ids", e.IDs},
		{"mask", e.Mask},
		{"log_probs", e.LogProbs},
		{"processed_log_probs", e.ProcessedLogProbs},
		{"entropies", e.Entropies},
		{"top_log_probs", e.TopLogProbs},
	} {
		if t.tensor != nil {
			list = append(list, NamedTensor{t.name, *t.tensor})
		}
	}
	return list
}

// Answer returns the text of the last turn that was generated; "" if none was.
func (e *TextResult) Answer() string {
	for _, t := range slices.Backward(e.Turns) {
		if t.Generated {
			return t.Text
		}
	}
	return ""
}

// Generated returns the number of tokens that were generated.
func (e *TextResult) Generated() (n int64) {
	for _, t := range e.Turns {
		if t.Generated {
			n += t.End - t.Begin
		}
	}
	return n
}

// form returns which logits are stored; LogitsNone by default.
func (e *Logits) form() string {
	if e == nil || e.Form == "" {
		return LogitsNone
	}
	return e.Form
}

// PerToken returns the number of logits that are stored for each token.
func (e *TextRequest) PerToken() int64 {
	switch e.Logits.form() {
	case LogitsTopK:
		return min(*e.Logits.K, e.Vocabulary)
	case LogitsIDs:
		return int64(len(e.Logits.IDs))
	case LogitsFull:
		return e.Vocabulary
	}
	return 0
}

// StoresLogits reports whether logits of an answer are stored, from 0.
func (e *TextRequest) StoresLogits(answer int64) bool {
	return e.PerToken() > 0 && (len(e.Logits.Answers) == 0 || slices.Contains(e.Logits.Answers, answer))
}

// HasTop returns an error unless the k largest raw logits of each token are stored.
func (e *TextRequest) HasTop(k int64) error {
	switch form := e.Logits.form(); {
	case form != LogitsTopK && form != LogitsFull, e.PerToken() < min(k, e.Vocabulary):
		return fmt.Errorf("text.logits: %s, %d of a token; must be topk with k at least %d, or full", form,
			e.PerToken(), k)
	case len(e.Logits.Answers) > 0:
		return fmt.Errorf("text.logits.answers: %v; must be absent: the mean is one of all tokens", e.Logits.Answers)
	case e.LogitsKind() != LogitsRaw:
		return fmt.Errorf("text.logits.kind: %q; must be raw", e.LogitsKind())
	}
	return nil
}

// LogitsKind returns the kind of logits, raw or processed, over which log-sum-exps are taken.
func (e *TextRequest) LogitsKind() string {
	if e.Logits == nil || e.Logits.Kind == "" {
		return LogitsRaw
	}
	return e.Logits.Kind
}

// LogitsBytes returns how many bytes the stored logits of a token take: their values and, of topk, their ids.
func (e *TextRequest) LogitsBytes() int64 {
	n := e.PerToken()
	if n == 0 {
		return 0
	}
	size, _ := DTypeSize(e.Logits.DType)
	if e.Logits.form() == LogitsTopK {
		size += 4
	}
	return n * size
}

// PromptTokens returns an upper bound of the tokens of the messages in their template, for a tokenizer that works on
// bytes.
func (e *TextRequest) PromptTokens() int64 {
	const template = 64 // what a template puts around a message
	n := int64(template)
	for _, m := range e.Messages {
		n += int64(len(m.Content)) + template
	}
	return min(n, MaxTokens)
}

// checkText checks what a prompt says of text, and that what is an image's alone is absent beside it.
func (p *Prompt) checkText(f *faults) {
	if last := len(p.Messages) - 1; last >= 0 {
		if p.Prompt != "" {
			f.add("prompt", quote(p.Prompt), "must be empty beside messages, the last of which is answered")
		}
		if p.Messages[last].Role == RoleAssistant {
			f.inItem("messages", last).add("role", quote(RoleAssistant),
				"must be another: the last message is what the model answers")
		}
		if n := len(p.Messages[last].Content); n > MaxPromptBytes {
			f.inItem("messages", last).add("content", strconv.Itoa(n)+" bytes", "must be at most "+
				strconv.Itoa(MaxPromptBytes)+": it is the prompt; messages before it may have "+
				strconv.Itoa(MaxAnswerBytes))
		}
	}
	if p.Text == nil {
		return
	}
	f.refuseImageFields(p)
}

// checkRules checks the logits against the other settings, and temperature and stop texts.
func (t *Text) checkRules(f *faults) {
	t.checkTemplate(f)
	perEvent := int64(1)
	if t.TokensPerEvent != nil {
		perEvent = *t.TokensPerEvent
	}
	temperature := 1.0
	if t.Temperature != nil {
		temperature = *t.Temperature
	}
	t.Logits.checkRulesAcross(f, perEvent, temperature)
	t.Logits.checkAnswers(f, t.Interaction)
	checkTemperature(f, temperature)
	checkStops(f, t.Stop)
}

// checkTemperature refuses temperatures that are almost 0: they would leave a single token to draw.
func checkTemperature(f *faults, temperature float64) {
	if temperature > 0 && temperature < MinTemperature {
		f.add("temperature", formatFloat(temperature), "must be 0, which takes the likeliest token, or at least "+
			formatFloat(MinTemperature))
	}
}

// checkRules checks what Text.rules does, and that nothing is left to a default and token ids are below the vocabulary.
func (e *TextRequest) checkRules(f *faults) {
	e.Logits.checkRulesAcross(f, e.TokensPerEvent, e.Temperature)
	e.Logits.checkAnswers(f, e.Interaction)
	e.Interaction.checkResolved(f.inStruct("interaction"))
	checkTemperature(f, e.Temperature)
	checkStops(f, e.Stop)
	if e.Logits != nil && e.Logits.form() == LogitsTopK && e.Logits.K == nil {
		f.inStruct("logits").add("k", "null", "must be there")
	}
	below := func(field string, ids []int64) {
		for i, id := range ids {
			if id >= e.Vocabulary && e.Vocabulary >= 1 && id < MaxVocabulary {
				f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(id, 10), "must be below the vocabulary, "+
					strconv.FormatInt(e.Vocabulary, 10))
				return
			}
		}
	}
	below("stop_token_ids", e.StopTokenIDs)
	if e.Logits != nil {
		below("logits.ids", e.Logits.IDs)
	}
}

func checkStops(f *faults, list []string) {
	for i, s := range list {
		if s == "" || len(s) > MaxStopBytes {
			f.add("stop["+strconv.Itoa(i)+"]", strconv.Itoa(len(s))+" bytes", "must be between 1 and "+
				strconv.Itoa(MaxStopBytes))
		}
	}
}

// checkRulesAcross checks the rules across the fields, and those with what is beside it.
func (e *Logits) checkRulesAcross(f *faults, perEvent int64, temperature float64) {
	if e == nil {
		return
	}
	g := f.inStruct("logits")
	form := e.form()
	if e.K != nil && form != LogitsTopK {
		g.add("k", strconv.FormatInt(*e.K, 10), "must be absent unless form is topk")
	}
	if len(e.IDs) > 0 && form != LogitsIDs {
		g.add("ids", strconv.Itoa(len(e.IDs))+" items", "must be absent unless form is ids")
	}
	if form == LogitsIDs {
		g.checkLength("ids", len(e.IDs), 1, MaxTopLogits)
	}
	if e.Kind == LogitsProcessed && temperature == 0 {
		g.add("kind", quote(e.Kind),
			"must be raw at temperature 0, which takes the likeliest token and divides by nothing")
	}
	if form == LogitsFull && perEvent > 1 && perEvent <= MaxTokensPerEvent {
		f.add("tokens_per_event", strconv.FormatInt(perEvent, 10),
			"must be 1 where logits are full: a sampler has one vector of a sample in memory")
	}
}

// checkAnswers checks that the answers whose logits are asked for can occur, given the most turns of the interaction.
func (e *Logits) checkAnswers(f *faults, with *Interaction) {
	if e == nil {
		return
	}
	g, most := f.inStruct("logits"), int64(1)
	switch {
	case with != nil && with.MaxTurns != nil:
		most = *with.MaxTurns
	case with != nil:
		most = MaxAnswers // its default is not known here
	}
	if len(e.Answers) > 0 && e.form() == LogitsNone {
		g.add("answers", fmt.Sprint(e.Answers), "must be absent unless logits are stored")
	}
	for _, answer := range e.Answers {
		if answer >= most {
			g.add("answers", strconv.FormatInt(answer, 10), "must be below "+strconv.FormatInt(most, 10)+
				", the most answers there are (interaction.max_turns)")
			return
		}
	}
}

// checkCompleted checks that a completed sample has all tensors of its sequence, with the same length, and whole turns.
func (e *TextResult) checkCompleted(f *faults, drawn *Drawn) {
	if e.IDs == nil || len(e.IDs.Shape) != 1 {
		f.add("ids", "null", "must be the sequence, [n], when completed")
		return
	}
	n := e.IDs.Shape[0]
	dtypes := map[string]string{"ids": "I32", "mask": "U8"}
	tensors := e.Tensors()
	switch {
	case drawn == nil && !f.requireLength("tensors", len(tensors), 6,
		"ids, mask, log_probs, processed_log_probs, entropies and top_log_probs"):
		return
	case e.Mask == nil || e.LogProbs == nil && e.ProcessedLogProbs == nil:
		f.add("tensors", strconv.Itoa(len(tensors)), "must have mask, and one of log_probs and processed_log_probs")
		return
	}
	for i := range tensors {
		t, want := &tensors[i].Tensor, "F32"
		if d, ok := dtypes[tensors[i].Name]; ok {
			want = d
		}
		if t.DType != want || len(t.Shape) != 1 || t.Shape[0] != n {
			f.inStruct(tensors[i].Name).add("shape", t.DType+" "+strconv.Itoa(len(t.Shape)), "must be "+want+" ["+
				strconv.FormatInt(n, 10)+"]")
		}
	}
	at := int64(0)
	for i, t := range e.Turns {
		g := f.inItem("turns", i)
		if t.Begin != at || t.End < t.Begin {
			g.add("begin", strconv.FormatInt(t.Begin, 10), "must be "+strconv.FormatInt(at, 10)+
				", where the turn before it ends")
			return
		}
		if at = t.End; t.Generated != (t.FinishReason != "") {
			g.add("finish_reason", quote(t.FinishReason), "must be there exactly where the turn was generated")
		}
	}
	e.checkTurns(f)
	if at != n {
		f.add("turns", "to "+strconv.FormatInt(at, 10), "must lead to "+strconv.FormatInt(n, 10)+
			", the end of the sequence")
	}
}
