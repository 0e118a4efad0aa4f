// What the studio's scripts find beside them as scripts that are no modules.
declare const uPlot: any;
declare const FORMATS: Record<string, (value: number) => string>;
declare const tickLabels: (ticks: number[], unit: string) => string[];
