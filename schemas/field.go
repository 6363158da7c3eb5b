package schemas

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Field describes one field of a struct of the contract, or of the settings of a program, as its tags say. The tags are
// the only place with its name, limits and default: validation, JSON Schema, flags, variables, files, defaults and the
// tables of the documents all come from them.
//
//	msgpack:"name,omitempty"  name on the wire; omitempty: absent when empty
//	key:"nats.url"            name of a setting in a file, and --nats-url; "-": no setting
//	help:"..."                what a setting is, env:"MEANDER_NATS_URL" its variable where that is not by the program
//	secret:"true"             its value is not printed; "url": the credentials in it are not
//	range:"1..MaxSteps"       bounds of a number, of each number of a list, or of a duration ("1s.."); either may be
//	                          missing, and "(0..1]" leaves out an end; "..0,null": or NaN, a
//	                          number that is not there
//	size:"0..MaxText,unique"  bounds of the bytes of a text or of the items of a list or map;
//	                          unique: every item comes at most once; cut: see Cut
//	enum:"Solvers"            legal values of a text, or of each of a list; "Solvers?": or empty; or the values
//	                          themselves: "json,console"
//	form:"token"              form of a text, or of each of a list: token, digest, sha256, path or reward_name;
//	                          "digest?": or empty
//	default:"8"               value that stands in for an absent one
//	absent:"the model's"      the same in words, where no literal says it
//	unit:"pixels"             unit of a number
//	wire:"needed"             it must be on the wire, if only empty
//	for:"image"               samples of images alone have it; on a part: all of its fields
//	of:"version"              each version of a lane's weights has its own (see Policy.SameLane)
//	digest:"content"          not part of the schedule digest, "-" of none (see digest.go)
//	through:"cfg_scales"      readers of the named field of the trajectory have the setting by it
//	flag:"steps"              flag of the command that sets the field; "group-size,n": with
//	                          a letter
type Field struct {
	// Name is the name on the wire, GoName the one in Go.
	Name, GoName string
	// Owner is the struct that declares the field: the struct itself, or a part that is embedded in it.
	Owner reflect.Type
	Type  reflect.Type
	// Needed fields must be on the wire, if only empty: a misspelt name must not stand for an empty value.
	Needed bool
	// Optional fields are absent when they are empty.
	Optional bool
	// Range and Size are nil where there is no bound.
	Range, Size *Range
	Unique      bool
	// Cut says that Encode makes the text legal, or the list no longer than it may be.
	Cut bool
	// Enum is nil where every text is legal. Empty allows an empty text besides.
	Enum  []string
	Form  string
	Empty bool
	// Default is a literal, Absent words; one of them at most.
	Default, Absent string
	Unit            string
	// Flag is empty for fields that no flag sets.
	Flag, Letter string
	// For is ForImage where only images have the field.
	For string
	// Of is OfVersion where each version of the weights has its own.
	Of string
	// Digest is DigestContent, DigestNone or empty: the field is in all digests of its struct (see digest.go).
	Digest string
	// Through is the field of a trajectory by which readers have this setting.
	Through string
	// Help and Env are of settings. Secret is "true" where the value is secret, SecretURL where it is a URL that may
	// have one in it.
	Help, Env, Secret string

	index []int // from the struct to the field, through the parts
}

// In returns the field's value in a struct.
func (f *Field) In(v reflect.Value) reflect.Value {
	for _, i := range f.index {
		v = v.Field(i)
	}
	return v
}

// Aliases are the other names by which programs may give the field: its flag and that flag's letter, with underscores,
// where these are not its name.
func (f *Field) Aliases() (names []string) {
	for _, name := range []string{strings.ReplaceAll(f.Flag, "-", "_"), f.Letter} {
		if name != "" && name != f.Name {
			names = append(names, name)
		}
	}
	return names
}

// Range is the numbers from Low to High; an open end is not one of them.
type Range struct {
	Low, High         float64
	OpenLow, OpenHigh bool
	// Null says that NaN may stand in the place of a number that is not there.
	Null bool
	// Durations are in nanoseconds, and printed with their unit.
	Durations bool
}

// Forms of a text.
const (
	FormToken      = "token"
	FormSHA256     = "sha256" // 64 hex digits, as stores of objects and of weights name files
	FormDigest     = "digest" // with the name of its algorithm, or a SHA-256
	FormPath       = "path"
	FormRewardName = "reward_name"
)

var forms = []string{FormToken, FormSHA256, FormDigest, FormPath, FormRewardName}

// What the tags for, of and digest say.
const (
	ForImage      = "image"
	OfVersion     = "version"
	DigestContent = "content"
	DigestNone    = "-"
	SecretURL     = "url"
)

// limits are the constants that tags name.
var limits = map[string]float64{
	"MaxAdapterConfig": MaxAdapterConfig, "MaxAdapterScale": MaxAdapterScale, "MaxAdvClip": MaxAdvClip,
	"MaxAnswerBytes": MaxAnswerBytes, "MaxAnswers": MaxAnswers, "MaxBatchGroups": MaxBatchGroups,
	"MaxBlobBytes": MaxBlobBytes, "MaxBranches": MaxBranches, "MaxCFGScale": MaxCFGScale,
	"MaxConditioning": MaxConditioning, "MaxCredits": MaxCredits, "MaxDebug": MaxDebug, "MaxDetail": MaxDetail,
	"MaxEpsilon": MaxEpsilon, "MaxEventBytes": MaxEventBytes, "MaxFPS": MaxFPS, "MaxFrames": MaxFrames,
	"MaxGroupSize": MaxGroupSize, "MaxHeaderName": MaxHeaderName, "MaxHeaderValue": MaxHeaderValue,
	"MaxHeaders": MaxHeaders, "MaxInlineImage": MaxInlineImage, "MaxInteractMS": MaxInteractMS,
	"MaxInteractTokens": MaxInteractTokens, "MaxLatentChannels": MaxLatentChannels, "MaxListItems": MaxListItems,
	"MaxAudio": MaxAudio, "MaxAudioRate": MaxAudioRate, "MaxMaking": MaxMaking, "MaxTenants": MaxTenants,
	"MaxMedia":    MaxMedia,
	"MaxMessages": MaxMessages, "MaxMetrics": MaxMetrics, "MaxMu": MaxMu, "MaxName": MaxName,
	"MaxNoiseLevel": MaxNoiseLevel, "MaxOutcomes": MaxOutcomes, "MaxParams": MaxParams, "MaxParts": MaxParts,
	"MaxPixelsPerToken": MaxPixelsPerToken, "MaxPolicyFiles": MaxPolicyFiles, "MaxPolicySpan": MaxPolicySpan,
	"MaxPreferences": MaxPreferences, "MaxPresentRewards": MaxPresentRewards, "MaxPriority": MaxPriority,
	"MaxPromptBytes":  MaxPromptBytes,
	"MaxRefillRounds": MaxRefillRounds, "MaxRewards": MaxRewards, "MaxRounds": MaxRounds,
	"MaxStageName": MaxStageName, "MaxStages": MaxStages, "MaxSchedulerConfig": MaxSchedulerConfig,
	"MaxScore": MaxScore, "MaxScoreReply": MaxScoreReply, "MaxSide": MaxSide, "MaxSigma": MaxSigma,
	"MaxStepLatents": MaxStepLatents, "MaxSteps": MaxSteps, "MaxStops": MaxStops, "MaxSubject": MaxSubject,
	"MaxSubsteps": MaxSubsteps, "MaxTemperature": MaxTemperature,
	"MaxTensorBytes": MaxTensorBytes, "MaxTensorDims": MaxTensorDims,
	"MaxText": MaxText, "MaxToken": MaxToken, "MaxTokenEvents": MaxTokenEvents, "MaxTokens": MaxTokens,
	"MaxTokensPerEvent": MaxTokensPerEvent, "MaxTopLogits": MaxTopLogits, "MaxTracks": MaxTracks,
	"MaxTurns": MaxTurns, "MaxVocabulary": MaxVocabulary, "MaxWarnings": MaxWarnings, "MaxWeight": MaxWeight,
	"MaxWeightsFile": MaxWeightsFile,
}

// enums are the lists of legal values that tags name.
var enums = map[string][]string{
	"AppliedStates": AppliedStates, "BatchStatuses": BatchStatuses, "BranchScopes": BranchScopes,
	"CFGRules": CFGRules, "ConditionTypes": ConditionTypes, "ControlActions": ControlActions,
	"ConversationStates": ConversationStates, "DTypes": DTypes, "DeadCodes": DeadCodes, "DebugTensors": DebugTensors,
	"EngineValues": EngineValues, "Engines": Engines, "FailedPolicies": FailedPolicies, "FilterOrders": FilterOrders,
	"FinishReasons": FinishReasons, "Grids": Grids, "GroupStatuses": GroupStatuses,
	"MediaFormats": MediaFormats, "MediaKinds": MediaKinds,
	"InitialNoises": InitialNoises, "LatentsDTypes": LatentsDTypes, "LogProbKinds": LogProbKinds,
	"LogitsForms": LogitsForms, "LogitsKinds": LogitsKinds, "MemberStatuses": MemberStatuses, "MuRules": MuRules,
	"OffsetStrategies": OffsetStrategies, "PredictionKeeps": PredictionKeeps, "Predictions": Predictions,
	"PresentServices": PresentServices, "RampShapes": RampShapes, "ReflexModes": ReflexModes,
	"RewardStatuses": RewardStatuses, "Roles": Roles, "RollReasons": RollReasons, "RolloutCompats": RolloutCompats,
	"RolloutSamplers": RolloutSamplers, "RuleActions": RuleActions, "RuleNames": RuleNames, "RunStates": RunStates,
	"SDETypes":          SDETypes,
	"ScoreImageFormats": ScoreImageFormats, "Services": Services, "Singletons": Singletons, "Solvers": Solvers,
	"StageKinds": StageKinds,
	"StdBases":   StdBases, "StdScales": StdScales, "StopReasons": StopReasons, "SwapRules": SwapRules,
	"TeacherCodes": TeacherCodes, "UnknownPolicies": UnknownPolicies, "VerifyModes": VerifyModes,
	"WindowStrategies": WindowStrategies, "ZeroStdPolicies": ZeroStdPolicies,
	"KeepRules": KeepRules, "PruneEnds": PruneEnds,
}

var fieldsOf sync.Map // reflect.Type -> []Field

// Fields returns the fields of a struct, with those of the parts that are embedded in it, in the order of their keys on
// the wire. It panics if a tag is not valid: then a struct of the contract is wrong.
func Fields(t reflect.Type) []Field {
	if list, ok := fieldsOf.Load(t); ok {
		return list.([]Field)
	}
	list := flatFields(t, nil, "")
	fieldsOf.Store(t, list)
	return list
}

// flatFields returns the fields of a struct and of the parts embedded in it, in the order of the source. index leads to
// the struct, kind is its tag for.
func flatFields(t reflect.Type, index []int, kind string) (list []Field) {
	for i := range t.NumField() {
		s, at := t.Field(i), append(slices.Clip(index), i)
		if !s.IsExported() {
			continue
		}
		kind := cmp.Or(s.Tag.Get("for"), kind)
		key := s.Tag.Get("key")
		if key == "-" {
			continue
		}
		if s.Anonymous || s.Type.Kind() == reflect.Struct && key == "" && s.Tag.Get("msgpack") == "" {
			list = append(list, flatFields(s.Type, at, kind)...)
			continue
		}
		f, err := newField(s)
		if err != nil {
			panic(fmt.Sprintf("schemas: %s.%s: %v", t.Name(), s.Name, err))
		}
		f.Owner, f.index, f.For = t, at, kind
		list = append(list, f)
	}
	return list
}

// dashes makes the name of a flag of a key.
var dashes = strings.NewReplacer("_", "-", ".", "-")

// newField parses the tags of a field. An error is a fault in the tags.
func newField(s reflect.StructField) (Field, error) {
	name, option, _ := strings.Cut(s.Tag.Get("msgpack"), ",")
	key := s.Tag.Get("key")
	f := Field{
		Name: cmp.Or(name, key), GoName: s.Name, Type: s.Type, Optional: option == "omitempty",
		Needed:  s.Tag.Get("wire") == "needed",
		Default: s.Tag.Get("default"), Absent: s.Tag.Get("absent"), Unit: s.Tag.Get("unit"), Of: s.Tag.Get("of"),
		Digest: s.Tag.Get("digest"), Through: s.Tag.Get("through"),
		Help: s.Tag.Get("help"), Env: s.Tag.Get("env"), Secret: s.Tag.Get("secret"),
	}
	f.Flag, f.Letter, _ = strings.Cut(cmp.Or(s.Tag.Get("flag"), dashes.Replace(key)), ",")
	var err error
	if tag := s.Tag.Get("range"); tag != "" {
		if f.Range, err = parseRange(tag, s.Type == reflect.TypeFor[time.Duration]()); err != nil {
			return f, err
		}
	}
	if tag := s.Tag.Get("size"); tag != "" {
		tag, f.Cut = strings.CutSuffix(tag, ",cut")
		tag, f.Unique = strings.CutSuffix(tag, ",unique")
		if f.Size, err = parseRange(tag, false); err != nil {
			return f, err
		}
	}
	var may bool
	f.Form, f.Empty = strings.CutSuffix(s.Tag.Get("form"), "?")
	if f.Form != "" && !slices.Contains(forms, f.Form) {
		return f, fmt.Errorf("form: %q; must be one of %s", f.Form, strings.Join(forms, ", "))
	}
	if tag := s.Tag.Get("enum"); tag != "" {
		tag, may = strings.CutSuffix(tag, "?")
		f.Empty = f.Empty || may
		var ok bool
		if f.Enum, ok = enums[tag]; !ok && strings.Contains(tag, ",") {
			f.Enum = strings.Split(tag, ",")
		} else if !ok {
			return f, fmt.Errorf("enum: %q; must be a list of legal values that fields know", tag)
		}
	}
	if f.Default != "" && f.Absent != "" {
		return f, fmt.Errorf("default: %q; must not be beside absent", f.Default)
	}
	_, err = f.DefaultValue()
	return f, err
}

// Phrase returns a description without the field name that it begins with, and without
// "is" or "are" after it, for tables and help.
func (f *Field) Phrase(description string) string {
	text := strings.TrimPrefix(description, f.Name+" ")
	for _, verb := range []string{"is ", "are "} {
		text = strings.TrimPrefix(text, verb)
	}
	return text
}

// DefaultValue returns the default as an int64, a float64, a bool or a string; nil without
// one.
func (f *Field) DefaultValue() (any, error) {
	t := f.Type
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	var v any
	var err error
	switch {
	case f.Default == "":
		return nil, nil
	case t.Kind() == reflect.Int64:
		v, err = strconv.ParseInt(f.Default, 10, 64)
	case t.Kind() == reflect.Float64:
		v, err = strconv.ParseFloat(f.Default, 64)
	case t.Kind() == reflect.Bool:
		v, err = strconv.ParseBool(f.Default)
	case t.Kind() == reflect.String:
		return f.Default, nil
	default:
		err = errors.New("must be on a number, a text or a bool")
	}
	if err != nil {
		return nil, fmt.Errorf("default: %q; %w", f.Default, err)
	}
	return v, nil
}

// parseRange parses LOW..HIGH. A parenthesis leaves out that end; brackets change nothing.
func parseRange(s string, durations bool) (*Range, error) {
	s, null := strings.CutSuffix(s, ",null")
	r := &Range{
		Null: null, Durations: durations,
		Low: math.Inf(-1), High: math.Inf(1), OpenLow: strings.HasPrefix(s, "("),
		OpenHigh: strings.HasSuffix(s, ")"),
	}
	low, high, ok := strings.Cut(strings.Trim(s, "()[]"), "..")
	if !ok {
		return nil, fmt.Errorf("range: %q; must be LOW..HIGH", s)
	}
	for _, end := range []struct {
		text string
		to   *float64
	}{{low, &r.Low}, {high, &r.High}} {
		if end.text == "" {
			continue
		}
		d, err := time.ParseDuration(end.text)
		if *end.to = float64(d); !durations {
			*end.to, err = evaluateBound(end.text)
		}
		if err != nil {
			return nil, fmt.Errorf("range: %q; %w", s, err)
		}
	}
	return r, nil
}

// evaluateBound returns the value of a bound: a number, a limit by its name, or two of these with -, + or * between
// them.
func evaluateBound(s string) (float64, error) {
	if i := strings.LastIndexAny(s, "+-*"); i > 0 {
		a, err := evaluateBound(s[:i])
		if err != nil {
			return 0, err
		}
		b, err := evaluateBound(s[i+1:])
		switch s[i] {
		case '+':
			return a + b, err
		case '-':
			return a - b, err
		}
		return a * b, err
	}
	if name, ok := strings.CutPrefix(s, "-"); ok {
		x, err := evaluateBound(name)
		return -x, err
	}
	if x, ok := limits[s]; ok {
		return x, nil
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return 0, fmt.Errorf("%q must be a number or a limit that fields know", s)
	}
	return x, nil
}

// Contains reports whether x is in the range; NaN is where that stands for a number that is not there.
func (r *Range) Contains(x float64) bool {
	return r.Null && math.IsNaN(x) ||
		(x > r.Low || x == r.Low && !r.OpenLow) && (x < r.High || x == r.High && !r.OpenHigh)
}

// Rule returns the rule for error messages, such as "must be between 1 and 8".
func (r *Range) Rule() string {
	format := formatBound
	if r.Durations {
		format = func(x float64) string { return time.Duration(x).String() }
	}
	low, high := format(r.Low), ""
	endless := math.IsInf(r.High, 1)
	if !endless {
		high = format(r.High)
	}
	switch {
	case endless && r.Low == 0 && !r.OpenLow:
		return "must not be negative"
	case endless && (r.Low == 1 || r.Low == 0):
		return "must be positive"
	case endless:
		return "must be at least " + low
	case r.OpenLow && !r.OpenHigh:
		return "must be above " + low + " and at most " + high
	case !r.OpenLow && r.OpenHigh:
		return "must be at least " + low + " and below " + high
	}
	return "must be between " + low + " and " + high
}

// formatBound formats an end of a range: integers in full, others with six digits. The limit of a
// sigma, for example, is 1 plus a rounding error.
func formatBound(x float64) string {
	if x == math.Trunc(x) && math.Abs(x) < 1<<53 {
		return strconv.FormatFloat(x, 'f', -1, 64)
	}
	return strconv.FormatFloat(x, 'g', 6, 64)
}
