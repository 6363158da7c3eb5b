package schemas

import "fmt"

// Streams behind the buckets, as the server names them.
const (
	StreamRunBucket      = "KV_" + RunBucket
	StreamCountBucket    = "KV_" + CountBucket
	StreamPolicyBucket   = "KV_" + PolicyBucket
	StreamPresenceBucket = "KV_" + PresenceBucket
	StreamSealBucket     = "KV_" + SealBucket
	StreamControlBucket  = "KV_" + ControlBucket
	StreamLeaseBucket    = "KV_" + LeaseBucket
	StreamBlobBucket     = "OBJ_" + BlobBucket
)

// The other services that take their work from durables; see ServiceSampler.
const (
	ServiceIntake    = "intake"
	ServiceAdvantage = "advantage"
)

// Durable describes a durable consumer of the server, from which a service receives its work. Services, the rights of
// roles and the doctor all use these descriptions.
type Durable struct {
	Stream, Name string
	// Service is the one whose processes share it: ServiceIntake ...
	Service string
	// Filters are the stored subjects that it delivers; none: all of the stream.
	Filters []string
	// Purpose says what it delivers.
	Purpose string
}

// PromptsDurable delivers prompts to intake.
func PromptsDurable() Durable {
	return Durable{Stream: StreamPrompts, Name: "intake", Service: ServiceIntake, Purpose: "prompts for intake"}
}

// ControlDurable delivers controls to intake.
func ControlDurable() Durable {
	return Durable{
		Stream: StreamControl, Name: "intake-control", Service: ServiceIntake, Purpose: "controls for intake",
	}
}

// AdvisoriesDurable delivers the server's notes on messages that it gave up to intake.
func AdvisoriesDurable() Durable {
	const filter = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"
	return Durable{
		Stream: StreamAdvisories, Name: "advisories", Service: ServiceIntake, Filters: []string{filter},
		Purpose: "the server's notes on messages that it gave up, for intake",
	}
}

// RequestsDurable delivers the requests of a lane to its samplers.
func RequestsDurable(lane Lane) Durable {
	filter := Address{Kind: KindRequest, Lane: lane}.Filter()
	return Durable{
		Stream: StreamRequests, Name: "sampler-" + string(lane), Service: ServiceSampler,
		Filters: []string{filter}, Purpose: "requests of the lane " + string(lane) + " for its samplers",
	}
}

// TrajectoriesDurable delivers trajectories to the reward service.
func TrajectoriesDurable() Durable {
	return Durable{
		Stream: StreamTrajectories, Name: "reward", Service: ServiceReward,
		Purpose: "trajectories for the reward service",
	}
}

// VerdictsDurable delivers verdicts to the reward service.
func VerdictsDurable() Durable {
	return Durable{
		Stream: StreamVerdicts, Name: "reward-verdicts", Service: ServiceReward,
		Filters: []string{Address{Kind: KindVerdict}.Filter()}, Purpose: "verdicts for the reward service",
	}
}

// RewardsDurable delivers a partition of MDR_REWARDS to the advantage service.
func RewardsDurable(partition int) Durable {
	return Durable{
		Stream: StreamRewards, Name: fmt.Sprintf("advantage-p%02d", partition), Service: ServiceAdvantage,
		Filters: []string{PartitionFilter(partition)},
		Purpose: fmt.Sprintf("rewards of partition %d for the advantage service", partition),
	}
}

// Durables returns the durable consumers of all services except the samplers: these have one for each lane, see
// RequestsDurable.
func Durables() []Durable {
	all := []Durable{PromptsDurable(), ControlDurable(), AdvisoriesDurable(), TrajectoriesDurable(), VerdictsDurable()}
	for partition := range RewardPartitions {
		all = append(all, RewardsDurable(partition))
	}
	return all
}
