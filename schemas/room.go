package schemas

// What a step event takes in MDR_STEPS without its tensors: the least, subject, headers and the
// server's own part included, and how often a name of the run, the group and the process stands in it.
// What a tensor adds to its elements, and a part to its bytes. Measured; a bound, see
// TestRoom_BytesOfSteps.
const (
	stepEventBytes = 860
	tensorBytes    = 190
	partBytes      = 420
	idCopies       = 3 // in the subject, the message id and the event
)

// StepBytes returns the most bytes that the steps of the sample take in MDR_STEPS, on a lane that serves p. For images
// with short names it is at most a fifth more than they really take.
func (e *Request) StepBytes(p *Policy) int64 {
	if e.Text != nil {
		return e.textBytes(p)
	}
	elements := p.StateElements(e.Frames, e.Height, e.Width)
	begin, end := e.Segment()
	item, _ := DTypeSize(e.LatentsDType)
	names := int64(idCopies * (len(e.Run) + len(e.UID)))
	tensor := func(bytes int64) int64 {
		return bytes + tensorBytes + (bytes/MaxPartBytes+1)*(partBytes+names)*min(1, bytes/smallTensor)
	}
	debug := int64(0)
	for _, name := range e.Debug {
		if name == "std" { // a single number
			debug += tensor(4)
		} else {
			debug += tensor(4 * elements)
		}
	}
	return int64(len(e.ReturnStepIndices)+len(e.CheckpointStepIndices))*tensor(item*elements) +
		(end-begin)*(stepEventBytes+names+debug)
}

// MaxReplyTokens bounds the tokens of a reply in its template, of tokenizers that work on bytes.
const MaxReplyTokens = MaxPromptBytes + MaxTokensPerEvent

// smallTensor is below what a tensor is never sent in parts.
const smallTensor = MaxPartBytes / 4

// What an event of tokens takes without its logits: the least, and of each token in it.
const (
	tokensEventBytes = 1000
	tokenBytes       = 32
)

// EventCount returns the most events of tokens that a sample of text can have, whatever the model.
func (e *TextRequest) EventCount() int64 {
	events, _ := e.maxEvents(MaxTokens)
	return events
}

// Tokens returns the most tokens that a sample can have on a model with the given context.
func (e *TextRequest) Tokens(context int64) int64 {
	replies := (e.Answers() - 1) * min(MaxReplyTokens, context)
	return min(e.PromptTokens()+e.Answers()*e.MaxNewTokens+replies, context+e.Answers())
}

// maxEvents returns the most events that a sample can have on a model with the given context: all, and those with
// logits.
func (e *TextRequest) maxEvents(context int64) (events, withLogits int64) {
	chunks := func(n, size int64) int64 { return (n + size - 1) / size }
	prompt, reply := min(e.PromptTokens(), context), min(MaxReplyTokens, context)
	drawn := func(answers int64) int64 {
		return min(answers*max(1, chunks(e.MaxNewTokens, e.TokensPerEvent)), context/e.TokensPerEvent+answers)
	}
	stored := int64(0)
	for answer := range e.Answers() {
		if e.StoresLogits(answer) {
			stored++
		}
	}
	return chunks(prompt, MaxTokensPerEvent) + drawn(e.Answers()) + (e.Answers()-1)*chunks(reply, MaxTokensPerEvent) +
		1, drawn(stored)
}

// textBytes is StepBytes for a sample of text.
func (e *Request) textBytes(p *Policy) int64 {
	t, names, context := e.Text, int64(idCopies*(len(e.Run)+len(e.UID))), int64(MaxTokens)
	if p.Text != nil {
		context = p.Text.MaxTokens
	}
	events, withLogits := t.maxEvents(context)
	logits := t.LogitsBytes() * t.TokensPerEvent
	if logits > 0 {
		logits += 2*tensorBytes + (logits/MaxPartBytes+2)*(partBytes+names)*min(1, logits/smallTensor)
	}
	return events*(tokensEventBytes+names) + tokenBytes*t.Tokens(context) + withLogits*logits
}
