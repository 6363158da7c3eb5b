package schemas

// Version is the schema version every event type has today.
const Version = 1

// Event is one message of the contract.
type Event interface {
	// Type is the versioned type name in the header Mdr-Type, e.g. "step/1".
	Type() string
	// Validate joins every fault of the event, each named by its field: those of the tags, and of the rules across
	// fields.
	Validate() error
}

// Keyed is an event that knows its own subject. A Prompt does not: its run is
// named by the subject alone.
type Keyed interface {
	Event
	// Subject is the one that the event is published on: its ids name it.
	Subject() string
}

// Type names.
const (
	TypePrompt     = "prompt/1"
	TypeRequest    = "request/1"
	TypeGroup      = "group/1"
	TypePlan       = "plan/1"
	TypeStep       = "step/1"
	TypeTokens     = "tokens/1"
	TypeTrajectory = "trajectory/1"
	TypeReward     = "reward/1"
	TypeVerdict    = "verdict/1"
	TypeRating     = "rating/1"
	TypeStepReward = "step_reward/1"
	TypeSelection  = "selection/1"
	TypeAdvantage  = "advantage/1"
	TypeBatch      = "batch/1"
	TypePolicy     = "policy/1"
	TypeDead       = "dead/1"
	TypeUpdate     = "update/1"
	TypeAlarm      = "alarm/1"
	TypeReceipt    = "receipt/1"
	TypeApplied    = "applied/1"
	TypePresence   = "presence/1"
	TypeControl    = "control/1"

	TypeControlReceipt = "control_receipt/1"

	TypeScoreRequest = "score_request/1"
	TypeScoreReply   = "score_reply/1"

	TypeInteractRequest = "interact_request/1"
	TypeInteractReply   = "interact_reply/1"

	TypeTeacherRequest = "teacher_request/1"
	TypeTeacherReply   = "teacher_reply/1"
)

func (*Prompt) Type() string      { return TypePrompt }
func (*GroupRecord) Type() string { return TypeGroup }
func (*Plan) Type() string        { return TypePlan }
func (*Request) Type() string     { return TypeRequest }
func (*Step) Type() string        { return TypeStep }
func (*Trajectory) Type() string  { return TypeTrajectory }
func (*Reward) Type() string      { return TypeReward }
func (*Verdict) Type() string     { return TypeVerdict }
func (*Rating) Type() string      { return TypeRating }
func (*Advantage) Type() string   { return TypeAdvantage }
func (*Batch) Type() string       { return TypeBatch }
func (*Policy) Type() string      { return TypePolicy }
func (*Dead) Type() string        { return TypeDead }
func (*Receipt) Type() string     { return TypeReceipt }
func (*Applied) Type() string     { return TypeApplied }
func (*Presence) Type() string    { return TypePresence }
func (*Control) Type() string     { return TypeControl }

func (*ControlReceipt) Type() string { return TypeControlReceipt }

// Subject returns the subject of the record, which is the claim of the uid: its run and uid name it.
func (e *GroupRecord) Subject() string { return GroupSubject(e.Run, e.UID) }

func (e *Plan) Subject() string { return PlanSubject(e.Run, e.UID) }

func (*ScoreRequest) Type() string { return TypeScoreRequest }
func (*ScoreReply) Type() string   { return TypeScoreReply }

func (e *Request) Subject() string {
	return RequestSubject(e.Run, e.Lane, e.UID, e.SampleIndex, e.Stage)
}

func (e *Step) Subject() string {
	return StepSubject(e.Run, e.UID, e.SampleIndex, e.Stage, e.Attempt, e.StepIndex)
}

func (e *Trajectory) Subject() string { return TrajectorySubject(e.Run, e.UID, e.SampleIndex, e.Stage) }

func (e *Reward) Subject() string {
	return RewardSubject(e.Run, e.Group.Batch, e.UID, e.SampleIndex)
}

func (e *Verdict) Subject() string { return VerdictSubject(e.Run, e.UID, e.SampleIndex, e.Name) }

func (e *Rating) Subject() string { return RatingSubject(e.Run, e.UID, e.Function) }

func (e *Advantage) Subject() string { return AdvantageSubject(e.Run, e.UID) }

func (e *Batch) Subject() string { return BatchSubject(e.Run, e.Batch) }

func (e *Policy) Subject() string { return PolicySubject(e.Lane, e.Tenant) }

func (e *Applied) Subject() string { return AppliedSubject(e.Lane, e.Tenant, e.Instance) }

func (e *Dead) Subject() string { return DeadSubject(e.Service, e.Run, e.UID) }

func (e *Control) Validate() error         { return CheckFields(e) }
func (e *ControlReceipt) Validate() error  { return CheckFields(e) }
func (e *GroupRecord) Validate() error     { return CheckFields(e) }
func (e *InteractRequest) Validate() error { return CheckFields(e) }
func (e *InteractReply) Validate() error   { return CheckFields(e) }
func (e *Applied) Validate() error         { return CheckFields(e) }
func (e *Presence) Validate() error        { return CheckFields(e) }
func (e *Plan) Validate() error            { return CheckFields(e) }
func (e *ScoreRequest) Validate() error    { return CheckFields(e) }
func (e *ScoreReply) Validate() error      { return CheckFields(e) }
func (e *TeacherRequest) Validate() error  { return CheckFields(e) }
func (e *TeacherReply) Validate() error    { return CheckFields(e) }
func (e *Update) Validate() error          { return CheckFields(e) }
func (e *Receipt) Validate() error         { return CheckFields(e) }
func (e *Reward) Validate() error          { return CheckFields(e) }
func (e *Verdict) Validate() error         { return CheckFields(e) }
func (e *Rating) Validate() error          { return CheckFields(e) }
func (e *Advantage) Validate() error       { return CheckFields(e) }
func (e *Batch) Validate() error           { return CheckFields(e) }
func (e *Step) Validate() error            { return CheckFields(e) }
func (e *Tensor) Validate() error          { return CheckFields(e) }
func (e *Ref) Validate() error             { return CheckFields(e) }
