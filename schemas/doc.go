// Package schemas is the wire contract of meander: the event structs, the
// subjects they travel on, the streams that store them, their msgpack codec and
// their validation. It has no behaviour beyond that and imports no other package
// of the project, so a client needs nothing else.
//
// An event is one msgpack map with snake_case keys. Keys are added, never renamed
// or reused. Readers ignore keys that they do not know; only in a prompt intake
// refuses them, unless the prompt says otherwise (unknown_fields). Every event has
// "v", the schema version of its type. Times are int64 Unix nanoseconds. A pointer
// field is optional: absent (or null) means the default stated in its comment, which
// may differ from an explicit zero. An absent list may also differ from an empty
// one; then the comment says so.
//
// What a field is stands in its tags and its comment (see Field): name, limits, legal
// values, default, unit and command-line flag. Decoder, validation, JSON Schema and
// documents all read the tags. Rules across fields are the method rules of a struct;
// it adds each violation to a collector (faults), which knows the path of the field.
//
// Encode and Decode turn events into bytes and back. Bytes from the wire pass a
// structural check first (Precheck), so no length that they claim is trusted, and
// every value must have the type of its field. Validate then checks the rules of
// the event itself; DecodeValid does all of it. Limits are constants, and they are
// in the JSON Schemas too. Byte strings of a decoded event alias the message.
//
// ComputeScheduleDigest, ContentDigest and StepsDigest are hashes of what was asked
// for and of what was computed, so that two runs can be compared.
//
// The same registry (Streams, Events) creates the JetStream streams, the JSON
// Schemas in jsonschema/ and the AsyncAPI document asyncapi.yaml.
package schemas
