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

// StepBytes is the most that the steps of the sample take in MDR_STEPS, for states of so
// many elements. It is at most a fifth more than they take where names are short.
func (e *Request) StepBytes(elements int64) int64 {
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
	return int64(len(e.ReturnStepIndices)+len(e.CheckpointStepIndices))*tensor(item*elements) + (end-begin)*(stepEventBytes+names+debug)
}

// smallTensor is below what a tensor is never sent in parts.
const smallTensor = MaxPartBytes / 4
