// Package schemas is the wire contract of meander: the event structs, the
// subjects they travel on, the streams that store them, their msgpack codec and
// their validation. It has no behaviour beyond that and imports no other package
// of the project, so a client needs nothing else.
//
// An event is one msgpack map with snake_case keys. Unknown keys are ignored on
// read, but for those of a prompt, which intake refuses unless the prompt says
// otherwise (unknown_fields); keys are added, never renamed or reused. Every event carries "v", the
// schema version of its type. Times are int64 Unix nanoseconds. A pointer field
// is optional: absent (or null) means the default stated in its comment, which is
// different from an explicit zero. So is an absent list from an empty one, where
// the comment says so.
//
// Encode and Decode turn events into bytes and back. Bytes from the wire pass a
// structural check first (Precheck), so no length that they claim is trusted, and
// every value must have the type of its field. Validate then checks the rules of
// the event itself; DecodeValid does all of it. Limits are constants, and they are
// in the JSON Schemas too. Byte strings of a decoded event alias the message.
//
// ComputeScheduleDigest, ContentDigest and StepsDigest name what was asked for and
// what came of it, so that two runs can be compared.
//
// The same registry (Streams, Events) creates the JetStream streams, the JSON
// Schemas in jsonschema/ and the AsyncAPI document asyncapi.yaml.
package schemas
