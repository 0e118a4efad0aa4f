// The rules that the studio translates from Python.
export const step_rule: (fields: Record<string, any>) => any;
export const run_rule: (fields: Record<string, any>) => any;
